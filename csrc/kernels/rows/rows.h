// Operations on one row of activations: norm, quantisation, rotary embedding, gate.
#pragma once

#include <cstdint>

#include "base/isa.h"
#include "kernels/rows/quantised.h"

namespace treadle {

// Where one row's quantised form goes; the fields are those of Quantised, for one row.
struct QuantisedRow {
    int8_t* q;
    int8_t* low;  // null: 8 bits
    float* scale;
    float* sum;  // null unless scale_k is 32
    int32_t* neg32;
    int32_t* neg16;
    int16_t* words;
};

// Groups with a smaller scale (values under 2e-34) become zeros: 1 / scale would not be finite.
inline constexpr float kLeastScale = 0x1p-126f;

struct RowKernels {
    // out[i] = x[i] / sqrt(mean(x^2) + eps) * weight[i]   (RMSNorm, arXiv 1910.07467); out may be x
    void (*rms_norm)(const float* x, const float* weight, int64_t n, float eps, float* out);

    // Quantises n values, a multiple of 32, with one scale per scale_k values (32 or 256; the last group may
    // be shorter).
    void (*quantise)(const float* x, int64_t n, int scale_k, const QuantisedRow& out);

    // Rotates the pairs of a head of n values by angles given as cos and sin [n / 2] (RoPE, arXiv
    // 2104.09864). Pairs are (i, i + n/2) with `neox`, (2i, 2i + 1) without. In place.
    void (*rope)(float* x, int64_t n, const float* cos, const float* sin, bool neox);

    // out[i] = gate[i] / (1 + exp(-gate[i])) * up[i]   (SwiGLU, arXiv 2002.05202)
    void (*swiglu)(const float* gate, const float* up, int64_t n, float* out);

    // Round to nearest, ties to even. Levels with bf16 instructions take numbers below 2^-126 for zero.
    void (*to_bf16)(const float* x, int64_t n, uint16_t* out);
};

RowKernels row_kernels(Isa isa);

}  // namespace treadle
