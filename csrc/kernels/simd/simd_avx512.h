// Sixteen 32-bit lanes in one 512-bit register. Included by ISA-specific sources only, inside their
// namespace.
//
// TREADLE_VNNI and TREADLE_BF16 say whether the source is compiled for those extensions.
using Int = __m512i;    // 16 x i32
using Float = __m512;   // 16 x f32
using Bytes = __m512i;  // 64 x u8 or i8, or 32 x i16

inline Int int_zero() { return _mm512_setzero_si512(); }
inline Int int_splat(int32_t value) { return _mm512_set1_epi32(value); }
inline Int int_load(const int32_t* p) { return _mm512_loadu_si512(p); }
template <int kShift>
inline Int int_shift_left(Int a) {
    return _mm512_slli_epi32(a, kShift);
}
template <int kShift>
inline Int int_shift_right_signed(Int a) {
    return _mm512_srai_epi32(a, kShift);
}
inline Int int_add(Int a, Int b) { return _mm512_add_epi32(a, b); }
inline Int int_sub(Int a, Int b) { return _mm512_sub_epi32(a, b); }
inline Float to_float(Int a) { return _mm512_cvtepi32_ps(a); }

inline Bytes bytes_load(const uint8_t* p) { return _mm512_loadu_si512(p); }
inline void bytes_store(uint8_t* p, Bytes a) { _mm512_storeu_si512(p, a); }
inline Bytes bytes_splat(uint8_t value) { return _mm512_set1_epi8(static_cast<char>(value)); }
inline Bytes bytes_and(Bytes a, Bytes b) { return _mm512_and_si512(a, b); }
template <int kShift>  // of 16-bit lanes: mask the bits that cross bytes afterwards
inline Bytes bytes_shift_right(Bytes a) {
    return _mm512_srli_epi16(a, kShift);
}
template <int kShift>
inline Bytes bytes_shift_left(Bytes a) {
    return _mm512_slli_epi16(a, kShift);
}
// a | (b & mask)
inline Bytes bytes_or_and(Bytes a, Bytes b, Bytes mask) {
    return _mm512_ternarylogic_epi32(a, b, mask, 0xF8);
}
// table[code] for 16 bytes at `table`
inline Bytes bytes_lookup(const int8_t* table, Bytes code) {
    return _mm512_shuffle_epi8(
        _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table))), code);
}
inline Bytes bytes_xor(Bytes a, Bytes b) { return _mm512_xor_si512(a, b); }
inline Bytes bytes_sub(Bytes a, Bytes b) { return _mm512_sub_epi8(a, b); }

// acc[n] += sum over b of u8 w[n][b] * i8 a[b], for the four bytes at `a`
template <bool kWide>  // whether w may exceed 127
inline Int dot_bytes(Int acc, Bytes w, const int8_t* a) {
    int32_t quad;
    __builtin_memcpy(&quad, a, 4);
#ifdef TREADLE_VNNI
    return _mm512_dpbusd_epi32(acc, w, _mm512_set1_epi32(quad));
#else
    const Bytes splat = _mm512_set1_epi32(quad);
    const Bytes ones = _mm512_set1_epi16(1);
    if constexpr (kWide) {
        // 255 * 127 * 2 overflows 16 bits: bit 7 apart from the rest
        const Bytes low = _mm512_and_si512(w, _mm512_set1_epi8(0x7F));
        const Bytes high = _mm512_andnot_si512(_mm512_set1_epi8(0x7F), w);
        acc = _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(high, splat), ones));
        return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(low, splat), ones));
    }
    return _mm512_add_epi32(acc, _mm512_madd_epi16(_mm512_maddubs_epi16(w, splat), ones));
#endif
}

// acc[n] += i16 w[n][0] * i16 pair[0] + i16 w[n][1] * i16 pair[1]
inline Int dot_words(Int acc, Bytes w, int32_t pair) {
#ifdef TREADLE_VNNI
    return _mm512_dpwssd_epi32(acc, w, _mm512_set1_epi32(pair));
#else
    return _mm512_add_epi32(acc, _mm512_madd_epi16(w, _mm512_set1_epi32(pair)));
#endif
}

// 32 u8 to 32 i16; 16 u8 or i8 to 16 i32
inline Bytes words_from_u8(const uint8_t* p) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Int ints_from_u8(const uint8_t* p) {
    return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
inline Int ints_from_i8(const uint8_t* p) {
    return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
template <int kShift>
inline Int int_shift_right(Int a) {
    return _mm512_srli_epi32(a, kShift);
}
inline Int int_and(Int a, Int b) { return _mm512_and_si512(a, b); }

inline Float float_zero() { return _mm512_setzero_ps(); }
inline Float float_splat(float value) { return _mm512_set1_ps(value); }
inline Float float_load(const float* p) { return _mm512_loadu_ps(p); }
inline void float_store(float* p, Float a) { _mm512_storeu_ps(p, a); }
inline Float float_from_half(const uint8_t* p) {
    return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
inline Float float_mul(Float a, Float b) { return _mm512_mul_ps(a, b); }
inline Float float_add(Float a, Float b) { return _mm512_add_ps(a, b); }
inline Float float_sub(Float a, Float b) { return _mm512_sub_ps(a, b); }
inline Float float_div(Float a, Float b) { return _mm512_div_ps(a, b); }
inline Float float_max(Float a, Float b) { return _mm512_max_ps(a, b); }
inline Float float_min(Float a, Float b) { return _mm512_min_ps(a, b); }
inline Float float_fma(Float a, Float b, Float c) { return _mm512_fmadd_ps(a, b, c); }    // a * b + c
inline Float float_fnma(Float a, Float b, Float c) { return _mm512_fnmadd_ps(a, b, c); }  // c - a * b
inline Float float_round(Float a) { return _mm512_roundscale_ps(a, 0); }                  // ties to even
inline Float float_scale_power(Float a, Float n) { return _mm512_scalef_ps(a, n); }       // a * 2^n, n whole
inline Int to_int(Float a) { return _mm512_cvtps_epi32(a); }                              // ties to even
inline Float float_abs(Float a) { return _mm512_abs_ps(a); }
inline void store_i8(int8_t* p, Int a) {
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a));
}
inline float float_max_of(Float a) { return _mm512_reduce_max_ps(a); }
// Sum of the lanes in a fixed order.
inline float float_sum_of(Float a) { return _mm512_reduce_add_ps(a); }

// Lanes of 2 x bf16: the even ones and the odd ones as floats
inline Float bf16_even(Bytes pairs) { return _mm512_castsi512_ps(_mm512_slli_epi32(pairs, 16)); }
inline Float bf16_odd(Bytes pairs) {
    return _mm512_castsi512_ps(_mm512_and_si512(pairs, _mm512_set1_epi32(static_cast<int>(0xFFFF0000))));
}
// acc[n] += w[n][0] * pair[0] + w[n][1] * pair[1] over bf16
inline Float dot_bf16(Float acc, Bytes w, uint32_t pair) {
#ifdef TREADLE_BF16
    return _mm512_dpbf16_ps(acc, reinterpret_cast<__m512bh>(w),
                            reinterpret_cast<__m512bh>(_mm512_set1_epi32(static_cast<int>(pair))));
#else
    const Bytes splat = _mm512_set1_epi32(static_cast<int>(pair));
    acc = float_fma(bf16_even(w), bf16_even(splat), acc);
    return float_fma(bf16_odd(w), bf16_odd(splat), acc);
#endif
}
// 16 floats to bf16, ties to even
inline void store_bf16(uint16_t* p, Float a) {
#ifdef TREADLE_BF16
    const __m256bh narrow = _mm512_cvtneps_pbh(a);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), reinterpret_cast<const __m256i&>(narrow));
#else
    const Int bits = _mm512_castps_si512(a);
    const Int odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    const Int rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7FFF)));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16)));
#endif
}

// 16 bf16 to floats
inline Float float_from_bf16(const uint8_t* p) {
    const __m256i narrow = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrow), 16));
}
// lane i ^ kDistance
template <int kDistance>
inline Float float_swap(Float a) {
    if constexpr (kDistance == 8) return _mm512_shuffle_f32x4(a, a, 0x4E);
    if constexpr (kDistance == 4) return _mm512_shuffle_f32x4(a, a, 0xB1);
    if constexpr (kDistance == 2) return _mm512_permute_ps(a, 0x4E);
    if constexpr (kDistance == 1) return _mm512_permute_ps(a, 0xB1);
}

// Bytes c that stand for c - 128, as the two products below want them; their sums are too large by
// kCodeOffset times the sum of the other factor.
#ifdef TREADLE_VNNI
inline constexpr int32_t kCodeOffset = 128;
using Codes = __m512i;
inline Codes codes(Bytes c) { return c; }
// acc[n] += sum over b of w[n][b] * i8 a[b], for the four bytes at `a`, from -127 to 127
inline Int dot_codes(Int acc, Codes w, const int8_t* a) { return dot_bytes<true>(acc, w, a); }
// the same for `a` from 0 to 127
inline Int dot_weights(Int acc, Codes w, const int8_t* a) { return dot_bytes<true>(acc, w, a); }
#else
inline constexpr int32_t kCodeOffset = 0;
struct Codes {
    __m512i value, magnitude;
    __mmask64 negative;
};
inline Codes codes(Bytes c) {
    const __m512i value = _mm512_xor_si512(c, _mm512_set1_epi8(static_cast<char>(0x80)));
    return {value, _mm512_abs_epi8(value), _mm512_movepi8_mask(value)};
}
// acc[n] += sum over b of w[n][b] * i8 a[b], for the four bytes at `a`, from -127 to 127
inline Int dot_codes(Int acc, const Codes& w, const int8_t* a) {
    int32_t quad;
    __builtin_memcpy(&quad, a, 4);
    const __m512i splat = _mm512_set1_epi32(quad);
    const __m512i factor = _mm512_mask_sub_epi8(splat, w.negative, _mm512_setzero_si512(), splat);
    const __m512i pairs = _mm512_maddubs_epi16(w.magnitude, factor);
    return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
// the same for `a` from 0 to 127
inline Int dot_weights(Int acc, const Codes& w, const int8_t* a) {
    int32_t quad;
    __builtin_memcpy(&quad, a, 4);
    const __m512i pairs = _mm512_maddubs_epi16(_mm512_set1_epi32(quad), w.value);
    return _mm512_add_epi32(acc, _mm512_madd_epi16(pairs, _mm512_set1_epi16(1)));
}
#endif
