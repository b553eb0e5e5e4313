// y = W x, the kernels.
//
// A kernel computes a tile: a few rows of activations times one panel (16 outputs) of weights over a range of
// K, added to a start. Every output is the same chain of operations whatever the tile it is in, so
// results do not depend on the number of rows, the split of K or the threads.
#pragma once

#include <cstdint>

#include "base/isa.h"
#include "kernels/rows/quantised.h"
#include "quant/format.h"

namespace treadle {

struct LinearTile {
    const uint8_t* panel;    // weights, at the panel's start
    int64_t k;               // columns of the whole matrix
    int64_t k_begin, k_end;  // the range to add; multiples of 256, except k_end == k
    Quantised a;             // integer formats: activations, from the tile's first row
    const float* x;          // float formats: activations [rows][x_stride]
    const uint16_t* x_bf16;  // BF16 weights on ISAs that multiply bf16: [rows][x_stride]
    int64_t x_stride;
    bool prefetch;  // weights come from memory and there is arithmetic to hide it behind
    // out = start + W x, both [rows][stride] of 16 values each; they may be the same. A start with stride 0
    // is one for all rows.
    const float* start;
    int64_t start_stride;
    float* out;
    int64_t out_stride;
};

using LinearKernel = void (*)(const LinearTile&);

inline constexpr int kMaxTileRows = 12;

// The kernels of one format on one ISA.
struct LinearKernels {
    int max_rows = 0;
    LinearKernel tile[kMaxTileRows] = {};  // [rows - 1]
    int max_two_byte_rows = 0;             // 0: the format has no kernels for two-byte activations
    LinearKernel two_byte_tile[kMaxTileRows] = {};
    bool bf16_activations = false;  // reads x_bf16, not x
};

LinearKernels linear_kernels(Isa isa, Format format);

}  // namespace treadle
