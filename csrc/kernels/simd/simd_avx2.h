// Sixteen 32-bit lanes in two 256-bit registers: the same operations as simd_avx512.h. Included by
// ISA-specific sources only, inside their namespace.
struct Int {
    __m256i lo, hi;
};
struct Float {
    __m256 lo, hi;
};
using Bytes = Int;  // 64 x u8 or i8, or 32 x i16

inline Int int_zero() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
inline Int int_splat(int32_t value) { return {_mm256_set1_epi32(value), _mm256_set1_epi32(value)}; }
inline Int int_load(const int32_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 8))};
}
template <int kShift>
inline Int int_shift_left(Int a) {
    return {_mm256_slli_epi32(a.lo, kShift), _mm256_slli_epi32(a.hi, kShift)};
}
template <int kShift>
inline Int int_shift_right(Int a) {
    return {_mm256_srli_epi32(a.lo, kShift), _mm256_srli_epi32(a.hi, kShift)};
}
inline Int int_and(Int a, Int b) { return {_mm256_and_si256(a.lo, b.lo), _mm256_and_si256(a.hi, b.hi)}; }
template <int kShift>
inline Int int_shift_right_signed(Int a) {
    return {_mm256_srai_epi32(a.lo, kShift), _mm256_srai_epi32(a.hi, kShift)};
}
inline Int int_add(Int a, Int b) { return {_mm256_add_epi32(a.lo, b.lo), _mm256_add_epi32(a.hi, b.hi)}; }
inline Int int_sub(Int a, Int b) { return {_mm256_sub_epi32(a.lo, b.lo), _mm256_sub_epi32(a.hi, b.hi)}; }
inline Float to_float(Int a) { return {_mm256_cvtepi32_ps(a.lo), _mm256_cvtepi32_ps(a.hi)}; }

inline Bytes bytes_load(const uint8_t* p) {
    return {_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)),
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + 32))};
}
inline void bytes_store(uint8_t* p, Bytes a) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), a.lo);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p + 32), a.hi);
}
inline Bytes bytes_splat(uint8_t value) {
    const __m256i v = _mm256_set1_epi8(static_cast<char>(value));
    return {v, v};
}
inline Bytes bytes_and(Bytes a, Bytes b) { return int_and(a, b); }
template <int kShift>  // of 16-bit lanes: mask the bits that cross bytes afterwards
inline Bytes bytes_shift_right(Bytes a) {
    return {_mm256_srli_epi16(a.lo, kShift), _mm256_srli_epi16(a.hi, kShift)};
}
template <int kShift>
inline Bytes bytes_shift_left(Bytes a) {
    return {_mm256_slli_epi16(a.lo, kShift), _mm256_slli_epi16(a.hi, kShift)};
}
// a | (b & mask)
inline Bytes bytes_or_and(Bytes a, Bytes b, Bytes mask) {
    return {_mm256_or_si256(a.lo, _mm256_and_si256(b.lo, mask.lo)),
            _mm256_or_si256(a.hi, _mm256_and_si256(b.hi, mask.hi))};
}
// table[code] for 16 bytes at `table`
inline Bytes bytes_lookup(const int8_t* table, Bytes code) {
    const __m256i t = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(table)));
    return {_mm256_shuffle_epi8(t, code.lo), _mm256_shuffle_epi8(t, code.hi)};
}
inline Bytes bytes_xor(Bytes a, Bytes b) {
    return {_mm256_xor_si256(a.lo, b.lo), _mm256_xor_si256(a.hi, b.hi)};
}
inline Bytes bytes_sub(Bytes a, Bytes b) {
    return {_mm256_sub_epi8(a.lo, b.lo), _mm256_sub_epi8(a.hi, b.hi)};
}

// acc[n] += sum over b of u8 w[n][b] * i8 a[b], for the four bytes at `a`
template <bool kWide>  // whether w may exceed 127
inline Int dot_bytes(Int acc, Bytes w, const int8_t* a) {
    int32_t quad;
    __builtin_memcpy(&quad, a, 4);
    const __m256i splat = _mm256_set1_epi32(quad), ones = _mm256_set1_epi16(1);
    const auto add = [&](__m256i sum, __m256i bytes) {
        return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(bytes, splat), ones));
    };
    if constexpr (kWide) {
        // 255 * 127 * 2 overflows 16 bits: bit 7 apart from the rest
        const __m256i low = _mm256_set1_epi8(0x7F);
        acc = {add(acc.lo, _mm256_andnot_si256(low, w.lo)), add(acc.hi, _mm256_andnot_si256(low, w.hi))};
        w = {_mm256_and_si256(w.lo, low), _mm256_and_si256(w.hi, low)};
    }
    return {add(acc.lo, w.lo), add(acc.hi, w.hi)};
}

// acc[n] += i16 w[n][0] * i16 pair[0] + i16 w[n][1] * i16 pair[1]
inline Int dot_words(Int acc, Bytes w, int32_t pair) {
    const __m256i splat = _mm256_set1_epi32(pair);
    return {_mm256_add_epi32(acc.lo, _mm256_madd_epi16(w.lo, splat)),
            _mm256_add_epi32(acc.hi, _mm256_madd_epi16(w.hi, splat))};
}

// 32 u8 to 32 i16; 16 u8 or i8 to 16 i32
inline Bytes words_from_u8(const uint8_t* p) {
    return {_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}
inline Int ints_from_u8(const uint8_t* p) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)))};
}
inline Int ints_from_i8(const uint8_t* p) {
    return {_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8)))};
}

inline Float float_zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
inline Float float_splat(float value) { return {_mm256_set1_ps(value), _mm256_set1_ps(value)}; }
inline Float float_load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
inline void float_store(float* p, Float a) {
    _mm256_storeu_ps(p, a.lo);
    _mm256_storeu_ps(p + 8, a.hi);
}
inline Float float_from_half(const uint8_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))),
            _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)))};
}
inline Float float_mul(Float a, Float b) { return {_mm256_mul_ps(a.lo, b.lo), _mm256_mul_ps(a.hi, b.hi)}; }
inline Float float_add(Float a, Float b) { return {_mm256_add_ps(a.lo, b.lo), _mm256_add_ps(a.hi, b.hi)}; }
inline Float float_sub(Float a, Float b) { return {_mm256_sub_ps(a.lo, b.lo), _mm256_sub_ps(a.hi, b.hi)}; }
inline Float float_div(Float a, Float b) { return {_mm256_div_ps(a.lo, b.lo), _mm256_div_ps(a.hi, b.hi)}; }
inline Float float_max(Float a, Float b) { return {_mm256_max_ps(a.lo, b.lo), _mm256_max_ps(a.hi, b.hi)}; }
inline Float float_min(Float a, Float b) { return {_mm256_min_ps(a.lo, b.lo), _mm256_min_ps(a.hi, b.hi)}; }
inline Float float_fma(Float a, Float b, Float c) {  // a * b + c
    return {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
}
inline Float float_fnma(Float a, Float b, Float c) {  // c - a * b
    return {_mm256_fnmadd_ps(a.lo, b.lo, c.lo), _mm256_fnmadd_ps(a.hi, b.hi, c.hi)};
}
inline Float float_round(Float a) {  // ties to even
    return {_mm256_round_ps(a.lo, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC),
            _mm256_round_ps(a.hi, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
}
inline Int to_int(Float a) { return {_mm256_cvtps_epi32(a.lo), _mm256_cvtps_epi32(a.hi)}; }  // ties to even
// a * 2^n, n whole; n below -126 gives zero
inline Float float_scale_power(Float a, Float n) {
    const __m256i bias = _mm256_set1_epi32(127), zero = _mm256_setzero_si256();
    const auto power = [&](__m256 v) {
        const __m256i e = _mm256_max_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(v), bias), zero);
        return _mm256_castsi256_ps(_mm256_slli_epi32(e, 23));
    };
    return {_mm256_mul_ps(a.lo, power(n.lo)), _mm256_mul_ps(a.hi, power(n.hi))};
}
inline Float float_abs(Float a) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, a.lo), _mm256_andnot_ps(sign, a.hi)};
}
inline void store_i8(int8_t* p, Int a) {
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(a.lo, a.hi), 0xD8);
    const __m128i bytes = _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(p), bytes);
}
inline float float_max_of(Float a) {
    const __m256 m = _mm256_max_ps(a.lo, a.hi);
    __m128 v = _mm_max_ps(_mm256_castps256_ps128(m), _mm256_extractf128_ps(m, 1));
    v = _mm_max_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_max_ss(v, _mm_movehdup_ps(v)));
}
// Sum of the lanes in a fixed order.
inline float float_sum_of(Float a) {
    const __m256 s = _mm256_add_ps(a.lo, a.hi);
    __m128 v = _mm_add_ps(_mm256_castps256_ps128(s), _mm256_extractf128_ps(s, 1));
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_movehdup_ps(v)));
}

// Lanes of 2 x bf16: the even ones and the odd ones as floats
inline Float bf16_even(Bytes pairs) {
    const Int bits = int_shift_left<16>(pairs);
    return {_mm256_castsi256_ps(bits.lo), _mm256_castsi256_ps(bits.hi)};
}
inline Float bf16_odd(Bytes pairs) {
    const Int bits = int_and(pairs, int_splat(static_cast<int>(0xFFFF0000)));
    return {_mm256_castsi256_ps(bits.lo), _mm256_castsi256_ps(bits.hi)};
}
// acc[n] += w[n][0] * pair[0] + w[n][1] * pair[1] over bf16
inline Float dot_bf16(Float acc, Bytes w, uint32_t pair) {
    const Bytes splat = int_splat(static_cast<int>(pair));
    acc = float_fma(bf16_even(w), bf16_even(splat), acc);
    return float_fma(bf16_odd(w), bf16_odd(splat), acc);
}
// 16 floats to bf16, ties to even
inline void store_bf16(uint16_t* p, Float a) {
    const auto round = [](__m256 v) {
        const __m256i bits = _mm256_castps_si256(v);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        return _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7FFF))),
                                 16);
    };
    const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(round(a.lo), round(a.hi)), 0xD8);
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), words);
}

// 16 bf16 to floats
inline Float float_from_bf16(const uint8_t* p) {
    const auto widen = [](const uint8_t* from) {
        const __m128i narrow = _mm_loadu_si128(reinterpret_cast<const __m128i*>(from));
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(narrow), 16));
    };
    return {widen(p), widen(p + 16)};
}
// lane i ^ kDistance
template <int kDistance>
inline Float float_swap(Float a) {
    if constexpr (kDistance == 8) return {a.hi, a.lo};
    if constexpr (kDistance == 4)
        return {_mm256_permute2f128_ps(a.lo, a.lo, 1), _mm256_permute2f128_ps(a.hi, a.hi, 1)};
    if constexpr (kDistance == 2) return {_mm256_permute_ps(a.lo, 0x4E), _mm256_permute_ps(a.hi, 0x4E)};
    if constexpr (kDistance == 1) return {_mm256_permute_ps(a.lo, 0xB1), _mm256_permute_ps(a.hi, 0xB1)};
}

// Bytes c that stand for c - 128, as the two products below want them; their sums are too large by
// kCodeOffset times the sum of the other factor.
inline constexpr int32_t kCodeOffset = 0;
using Codes = Int;
inline Codes codes(Bytes c) { return bytes_xor(c, bytes_splat(0x80)); }
// acc[n] += sum over b of w[n][b] * i8 a[b], for the four bytes at `a`, from -127 to 127
inline Int dot_codes(Int acc, Codes w, const int8_t* a) {
    int32_t quad;
    __builtin_memcpy(&quad, a, 4);
    const __m256i splat = _mm256_set1_epi32(quad), ones = _mm256_set1_epi16(1);
    const auto add = [&](__m256i sum, __m256i bytes) {
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(bytes), _mm256_sign_epi8(splat, bytes));
        return _mm256_add_epi32(sum, _mm256_madd_epi16(pairs, ones));
    };
    return {add(acc.lo, w.lo), add(acc.hi, w.hi)};
}
// the same for `a` from 0 to 127
inline Int dot_weights(Int acc, Codes w, const int8_t* a) {
    int32_t quad;
    __builtin_memcpy(&quad, a, 4);
    const __m256i splat = _mm256_set1_epi32(quad), ones = _mm256_set1_epi16(1);
    const auto add = [&](__m256i sum, __m256i bytes) {
        return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(splat, bytes), ones));
    };
    return {add(acc.lo, w.lo), add(acc.hi, w.hi)};
}
