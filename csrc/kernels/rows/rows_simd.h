// The row operations, for any SIMD header. Included by ISA-specific sources inside their namespace.

#include "kernels/simd/exp.h"
#include "kernels/simd/sums.h"

inline void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
    Float squares = float_zero();
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        const Float v = float_load(x + i);
        squares = float_fma(v, v, squares);
    }
    float sum = float_sum_of(squares);
    for (; i < n; ++i) sum += x[i] * x[i];
    const float factor = 1.0f / __builtin_sqrtf(sum / static_cast<float>(n) + eps);
    for (i = 0; i + 16 <= n; i += 16)
        float_store(out + i,
                    float_mul(float_mul(float_load(x + i), float_splat(factor)), float_load(weight + i)));
    for (; i < n; ++i) out[i] = x[i] * factor * weight[i];
}

// 16 values, as one byte each or as two that are worth 128 * high + low with low in [-64, 63].
inline void store_quantised(const QuantisedRow& out, int64_t at, Int q) {
    if (out.low == nullptr) return store_i8(out.q + at, q);
    const Int high = int_shift_right_signed<7>(int_add(q, int_splat(64)));
    store_i8(out.q + at, high);
    store_i8(out.low + at, int_sub(q, int_shift_left<7>(high)));
}

inline void quantise(const float* x, int64_t n, int scale_k, const QuantisedRow& out) {
    for (int64_t begin = 0; begin < n; begin += scale_k) {
        const int64_t end = begin + scale_k < n ? begin + scale_k : n;
        Float largest = float_zero();
        for (int64_t i = begin; i < end; i += 16) largest = float_max(largest, float_abs(float_load(x + i)));
        const float scale = float_max_of(largest) / (out.low != nullptr ? 16256.0f : 127.0f);
        const Float inverse = float_splat(scale >= kLeastScale ? 1.0f / scale : 0.0f);
        out.scale[begin / scale_k] = scale;
        for (int64_t i = begin; i < end; i += 16)
            store_quantised(out, i, to_int(float_mul(float_load(x + i), inverse)));
        // A loop of its own: 32 bytes are not loaded right behind the two stores that make them.
        for (int64_t i = begin; i < end; i += 32) {
            int32_t first, second;
            sums_of_16(out.q + i, first, second);
            if (out.low != nullptr) {
                int32_t low_first, low_second;
                sums_of_16(out.low + i, low_first, low_second);
                first = first * 128 + low_first;
                second = second * 128 + low_second;
            }
            const int32_t sum = first + second;
            out.neg16[i / 16] = -kOffset16 * first;
            out.neg16[i / 16 + 1] = -kOffset16 * second;
            out.neg32[i / 32] = -kOffset32 * sum;
            out.words[i / 32] = static_cast<int16_t>(sum);
            if (out.sum != nullptr) out.sum[i / 32] = scale * static_cast<float>(sum);
        }
    }
}

inline void rope(float* x, int64_t n, const float* cos, const float* sin, bool neox) {
    const int64_t half = n / 2;
    if (!neox) {
        for (int64_t i = 0; i < half; ++i) {
            const float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * cos[i] - b * sin[i];
            x[2 * i + 1] = b * cos[i] + a * sin[i];
        }
        return;
    }
    int64_t i = 0;
    for (; i + 16 <= half; i += 16) {
        const Float a = float_load(x + i), b = float_load(x + half + i);
        const Float c = float_load(cos + i), s = float_load(sin + i);
        float_store(x + i, float_sub(float_mul(a, c), float_mul(b, s)));
        float_store(x + half + i, float_add(float_mul(b, c), float_mul(a, s)));
    }
    for (; i < half; ++i) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[i] + a * sin[i];
    }
}

inline void swiglu(const float* gate, const float* up, int64_t n, float* out) {
    const Float one = float_splat(1.0f), minus_log2e = float_splat(-1.4426950408889634f);
    const auto sixteen = [&](const float* g, const float* u, float* o) {
        const Float x = float_load(g);
        // 2^128 is infinite, and x / infinity is the zero that is wanted
        const Float e = float_exp2(float_min(float_mul(x, minus_log2e), float_splat(128.0f)));
        float_store(o, float_mul(float_div(x, float_add(one, e)), float_load(u)));
    };
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) sixteen(gate + i, up + i, out + i);
    if (i == n) return;
    float g[16] = {}, u[16] = {}, o[16];
    for (int64_t j = i; j < n; ++j) g[j - i] = gate[j], u[j - i] = up[j];
    sixteen(g, u, o);
    for (int64_t j = i; j < n; ++j) out[j] = o[j - i];
}

inline void to_bf16(const float* x, int64_t n, uint16_t* out) {
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) store_bf16(out + i, float_load(x + i));
    if (i == n) return;
    float rest[16] = {};
    uint16_t narrow[16];
    for (int64_t j = i; j < n; ++j) rest[j - i] = x[j];
    store_bf16(narrow, float_load(rest));
    for (int64_t j = i; j < n; ++j) out[j] = narrow[j - i];
}

RowKernels row_kernels() { return {rms_norm, quantise, rope, swiglu, to_bf16}; }
