// The readable reference of the row operations.
#include <algorithm>
#include <cmath>

#include "base/half.h"
#include "kernels/rows/rows.h"

namespace treadle::ref {

namespace {

void rms_norm(const float* x, const float* weight, int64_t n, float eps, float* out) {
    double squares = 0;
    for (int64_t i = 0; i < n; ++i) squares += static_cast<double>(x[i]) * x[i];
    const float factor = static_cast<float>(1.0 / std::sqrt(squares / static_cast<double>(n) + eps));
    for (int64_t i = 0; i < n; ++i) out[i] = x[i] * factor * weight[i];
}

void quantise(const float* x, int64_t n, int scale_k, const QuantisedRow& out) {
    for (int64_t begin = 0; begin < n; begin += scale_k) {
        const int64_t end = std::min(begin + scale_k, n);
        float largest = 0;
        for (int64_t i = begin; i < end; ++i) largest = std::max(largest, std::fabs(x[i]));
        const float scale = largest / (out.low != nullptr ? 16256.0f : 127.0f);
        const float inverse = scale >= kLeastScale ? 1.0f / scale : 0.0f;
        out.scale[begin / scale_k] = scale;
        for (int64_t i = begin; i < end; i += 16) {
            int sum = 0;
            for (int64_t j = i; j < i + 16; ++j) {
                const int q = static_cast<int>(std::lrint(x[j] * inverse));
                sum += q;
                const int high = out.low != nullptr ? (q + 64) >> 7 : q;
                out.q[j] = static_cast<int8_t>(high);
                if (out.low != nullptr) out.low[j] = static_cast<int8_t>(q - high * 128);
            }
            out.neg16[i / 16] = -kOffset16 * sum;
        }
        for (int64_t g = begin / 32; g < end / 32; ++g) {
            const int sum = -(out.neg16[2 * g] + out.neg16[2 * g + 1]) / kOffset16;
            out.neg32[g] = -kOffset32 * sum;
            out.words[g] = static_cast<int16_t>(sum);
            if (out.sum != nullptr) out.sum[g] = scale * static_cast<float>(sum);
        }
    }
}

void rope(float* x, int64_t n, const float* cos, const float* sin, bool neox) {
    for (int64_t i = 0; i < n / 2; ++i) {
        float& a = x[neox ? i : 2 * i];
        float& b = x[neox ? i + n / 2 : 2 * i + 1];
        const float rotated = a * cos[i] - b * sin[i];
        b = b * cos[i] + a * sin[i];
        a = rotated;
    }
}

void swiglu(const float* gate, const float* up, int64_t n, float* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
}

void to_bf16(const float* x, int64_t n, uint16_t* out) {
    for (int64_t i = 0; i < n; ++i) out[i] = float_to_bf16(x[i]);
}

}  // namespace

RowKernels row_kernels() { return {rms_norm, quantise, rope, swiglu, to_bf16}; }

}  // namespace treadle::ref
