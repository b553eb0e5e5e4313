// The integer tile, for any SIMD header. Included by ISA-specific sources inside their namespace.
//
// One lane per output, one broadcast of four activations per dot product: no horizontal sums, and the weights
// of a step are unpacked once for all rows of the tile.

// Unpacks the weights of 32 k and calls use(s, w) for each step s of 4 k, w as unsigned bytes.
template <Format kFormat, class Use>
inline __attribute__((always_inline)) void unpack_group(const uint8_t* codes, Use use) {
    constexpr int kBits = info(kFormat).bits;
    const auto each = [&]<int... kStep>(std::integer_sequence<int, kStep...>, auto&& step) {
        (step(std::integral_constant<int, kStep>{}), ...);
    };
    if constexpr (kBits == 8) {
        each(std::make_integer_sequence<int, 8>{}, [&](auto s) { use(s, bytes_load(codes + s * 64)); });
    } else if constexpr (kBits == 2 || kBits == 3) {
        const Bytes mask = bytes_splat(3), bit = bytes_splat(4);
        const Bytes high = kBits == 3 ? bytes_load(codes + 128) : mask;
        each(std::make_integer_sequence<int, 2>{}, [&](auto v) {
            const Bytes packed = bytes_load(codes + v * 64);
            each(std::make_integer_sequence<int, 4>{}, [&](auto i) {
                constexpr int kStep = v * 4 + i;
                Bytes w = bytes_and(i == 0 ? packed : bytes_shift_right<2 * i>(packed), mask);
                if constexpr (kBits == 3) {
                    if constexpr (kStep < 2)
                        w = bytes_or_and(w, bytes_shift_left<2 - kStep>(high), bit);
                    else
                        w = bytes_or_and(w, bytes_shift_right<kStep - 2>(high), bit);
                }
                use(std::integral_constant<int, kStep>{}, w);
            });
        });
    } else {
        const Bytes mask = bytes_splat(0xF);
        const Bytes bit = bytes_splat(0x10), two = bytes_splat(0x30);
        const Bytes fifth = kBits == 5 ? bytes_load(codes + 256) : mask;
        each(std::make_integer_sequence<int, 4>{}, [&](auto v) {
            const Bytes packed = bytes_load(codes + v * 64);
            each(std::make_integer_sequence<int, 2>{}, [&](auto i) {
                constexpr int kStep = v * 2 + i;
                Bytes w = bytes_and(i == 0 ? packed : bytes_shift_right<4>(packed), mask);
                if constexpr (info(kFormat).codebook)
                    w = bytes_xor(bytes_lookup(kCodebook, w), bytes_splat(0x80));  // i8 + 128
                if constexpr (kBits == 5) {
                    if constexpr (kStep < 4)
                        w = bytes_or_and(w, bytes_shift_left<4 - kStep>(fifth), bit);
                    else
                        w = bytes_or_and(w, bytes_shift_right<kStep - 4>(fifth), bit);
                }
                if constexpr (kBits == 6) {
                    const Bytes high = bytes_load(codes + 256 + kStep / 4 * 64);
                    constexpr int kAt = kStep % 4 * 2;
                    if constexpr (kAt < 4)
                        w = bytes_or_and(w, bytes_shift_left<4 - kAt>(high), two);
                    else
                        w = bytes_or_and(w, bytes_shift_right<kAt - 4>(high), two);
                }
                use(std::integral_constant<int, kStep>{}, w);
            });
        });
    }
}

constexpr int log2_of(int value) { return value <= 1 ? 0 : 1 + log2_of(value / 2); }

// Over one superblock: sum of integer minimum * sum of q, in pairs of 16-bit words.
template <Format kFormat, int kRows>
inline void sum_minimums(const LinearTile& t, int64_t k, const uint8_t* scales, Int (&mins)[kRows]) {
    for (int r = 0; r < kRows; ++r) mins[r] = int_zero();
    if constexpr (kFormat == Format::q2_k) {
        // One minimum per 16 k in the high half byte; the upper word of each lane is zero.
        for (int i = 0; i < kSuper / 16; ++i) {
            const Bytes m = int_shift_right<4>(ints_from_u8(scales + i * kPanel));
            for (int r = 0; r < kRows; ++r)
                mins[r] =
                    dot_words(mins[r], m, -t.a.neg16[(r * t.a.groups32 + k / kGroup) * 2 + i] / kOffset16);
        }
    } else {
        const uint8_t* at = scales + kGroupsPerSuper * kPanel;
        for (int pair = 0; pair < kGroupsPerSuper / 2; ++pair) {
            const Bytes m = words_from_u8(at + pair * 2 * kPanel);
            for (int r = 0; r < kRows; ++r) {
                int32_t sums;
                __builtin_memcpy(&sums, t.a.words + r * t.a.groups32 + k / kGroup + pair * 2, 4);
                mins[r] = dot_words(mins[r], m, sums);
            }
        }
    }
}

template <Format kFormat, int kRows, bool kTwoBytes>
void int_tile(const LinearTile& t) {
    constexpr const FormatInfo& f = info(kFormat);
    constexpr bool kWide = f.bits == 8 || f.codebook;
    constexpr int kScalesPerGroup = kGroup / f.scale_k;  // 1 or 2
    constexpr size_t kGroupBytes = group_bytes(kFormat);

    const uint8_t* w = t.panel + t.k_begin / kSuper * super_bytes(kFormat, kGroupsPerSuper);
    for (int64_t k = t.k_begin; k < t.k_end; k += kSuper) {
        const int groups =
            f.super ? kGroupsPerSuper : static_cast<int>((t.k - k < kSuper ? t.k - k : kSuper) / kGroup);
        const size_t header = header_bytes(kFormat, groups);
        const uint8_t* scales = w + 2 * kPanel * (f.min ? 2 : 1);  // formats with super-scales
        Float
            sum[kRows];  // with super-scales: of this superblock, before the super-scale; else: of all so far
        for (int r = 0; r < kRows; ++r)
            sum[r] = f.super          ? float_zero()
                     : k == t.k_begin ? float_load(t.start + r * t.start_stride)
                                      : float_load(t.out + r * t.out_stride);

        for (int g = 0; g < groups; ++g) {
            const int64_t group = k / kGroup + g;
            Int acc[kRows], low[kRows];  // low: of the activations' low bytes
            const auto start = [&](int half) {
                for (int r = 0; r < kRows; ++r) {
                    acc[r] = low[r] = int_zero();
                    if constexpr (f.offset != 0) {
                        const int32_t* negative = f.scale_k == 16
                                                      ? t.a.neg16 + (r * t.a.groups32 + group) * 2 + half
                                                      : t.a.neg32 + r * t.a.groups32 + group;
                        constexpr int kOffset = f.scale_k == 16 ? kOffset16 : kOffset32;
                        Int& sum = (kTwoBytes ? low : acc)[r];
                        sum = int_splat(*negative);
                        if constexpr (f.offset < kOffset)
                            sum = int_shift_right_signed<log2_of(kOffset / f.offset)>(sum);
                    }
                }
            };
            const auto finish = [&](int half) {
                if constexpr (kTwoBytes)
                    for (int r = 0; r < kRows; ++r) acc[r] = int_add(int_shift_left<7>(acc[r]), low[r]);
                if constexpr (f.super) {
                    const uint8_t* at = scales + (g * kScalesPerGroup + half) * kPanel;
                    Int scale = f.min ? ints_from_u8(at) : ints_from_i8(at);
                    if constexpr (kFormat == Format::q2_k) scale = int_and(scale, int_splat(0xF));
                    const Float scale_f = to_float(scale);
                    for (int r = 0; r < kRows; ++r) sum[r] = float_fma(to_float(acc[r]), scale_f, sum[r]);
                } else {
                    const Float d = float_from_half(w + g * 2 * kPanel);
                    const Float m = float_from_half(w + (f.min ? groups + g : g) * 2 * kPanel);
                    for (int r = 0; r < kRows; ++r) {
                        const int64_t at = r * t.a.groups32 + group;
                        const Float scale = float_mul(d, float_splat(t.a.scale[at]));
                        sum[r] = float_fma(to_float(acc[r]), scale, sum[r]);
                        if constexpr (f.min) sum[r] = float_fma(m, float_splat(t.a.sum[at]), sum[r]);
                    }
                }
            };
            const uint8_t* codes = w + header + g * kGroupBytes;
            if (t.prefetch)
                for (size_t line = 0; line < kGroupBytes; line += 64)
                    for (size_t ahead = kAhead; ahead <= kFarthest; ahead += kAhead)
                        __builtin_prefetch(codes + ahead + line, 0, 1);
            start(0);
            unpack_group<kFormat>(codes, [&](auto s, Bytes weights) {
                if constexpr (kScalesPerGroup == 2 && s == 4) {
                    finish(0);
                    start(1);
                }
                for (int r = 0; r < kRows; ++r) {
                    const int64_t at = r * t.a.q_stride + group * kGroup + s * 4;
                    acc[r] = dot_bytes<kWide>(acc[r], weights, t.a.q + at);
                    if constexpr (kTwoBytes) low[r] = dot_bytes<kWide>(low[r], weights, t.a.low + at);
                }
            });
            finish(kScalesPerGroup - 1);
        }

        if constexpr (!f.super) {
            for (int r = 0; r < kRows; ++r) float_store(t.out + r * t.out_stride, sum[r]);
        } else {
            const Float d = float_from_half(w);
            Int mins[kRows];
            if constexpr (f.min) sum_minimums<kFormat, kRows>(t, k, scales, mins);
// Unasked, GCC 12 leaves this a loop from 10 rows on, and then keeps the sums in memory.
#pragma GCC unroll 16
            for (int r = 0; r < kRows; ++r) {
                float* out = t.out + r * t.out_stride;
                const Float start = float_load(k == t.k_begin ? t.start + r * t.start_stride : out);
                const Float scale = float_splat(t.a.scale[r * t.a.groups32 + k / kSuper]);
                Float total = float_fma(sum[r], float_mul(d, scale), start);
                if constexpr (f.min) {
                    const Float dmin = float_from_half(w + 2 * kPanel);
                    total = float_fnma(to_float(mins[r]), float_mul(dmin, scale), total);
                }
                float_store(out, total);
            }
        }
        w += super_bytes(kFormat, groups);
    }
}
