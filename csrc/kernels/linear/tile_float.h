// The tiles of float formats, for any SIMD header. Included by ISA-specific sources inside their namespace.

template <Format kFormat, int kRows>
void float_tile(const LinearTile& t) {
    constexpr int kUnit =
        kFormat == Format::f16 ? 2 : 4;  // bytes per lane and step; a BF16 step is a pair of k
    constexpr int kStepK = kFormat == Format::bf16 ? 2 : 1;
    Float acc[kRows];
    for (int r = 0; r < kRows; ++r) acc[r] = float_load(t.start + r * t.start_stride);
    const uint8_t* w = t.panel + t.k_begin / kStepK * kUnit * kPanel;
    for (int64_t k = t.k_begin; k < t.k_end; k += kStepK, w += kUnit * kPanel) {
        if (t.prefetch)
            for (size_t ahead = kAhead; ahead <= kFarthest; ahead += kAhead)
                __builtin_prefetch(w + ahead, 0, 1);
        if constexpr (kFormat == Format::bf16) {
            const Bytes pairs = bytes_load(w);
#ifdef TREADLE_BF16
            for (int r = 0; r < kRows; ++r) {
                uint32_t pair;
                __builtin_memcpy(&pair, t.x_bf16 + r * t.x_stride + k, 4);
                acc[r] = dot_bf16(acc[r], pairs, pair);
            }
#else
            const Float even = bf16_even(pairs), odd = bf16_odd(pairs);
            for (int r = 0; r < kRows; ++r) {
                const float* x = t.x + r * t.x_stride + k;
                acc[r] = float_fma(odd, float_splat(x[1]), float_fma(even, float_splat(x[0]), acc[r]));
            }
#endif
        } else {
            const Float weights =
                kFormat == Format::f16 ? float_from_half(w) : float_load(reinterpret_cast<const float*>(w));
            for (int r = 0; r < kRows; ++r)
                acc[r] = float_fma(weights, float_splat(t.x[r * t.x_stride + k]), acc[r]);
        }
    }
    for (int r = 0; r < kRows; ++r) float_store(t.out + r * t.out_stride, acc[r]);
}
