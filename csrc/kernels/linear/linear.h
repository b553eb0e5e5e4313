// y = W x, the kernels.
//
// A kernel computes a tile: a few rows of activations times one panel (16 outputs) of weights over a range of
// K, added to a start. On machines with a tile unit some formats also have a block kernel, which does the
// same for any number of rows at once, so that the weights are unpacked once for all of them. Every output is
// the same chain of operations whatever the tile it is in, so results do not depend on the number of rows,
// the split of K or the threads.
#pragma once

#include <cstdint>

#include "base/isa.h"
#include "kernels/rows/quantised.h"
#include "quant/format.h"

namespace treadle {

struct LinearTile {
    const uint8_t* panel;    // weights, at the panel's start
    int64_t rows;            // of activations; a tile kernel knows its own number
    int64_t k;               // columns of the whole matrix
    int64_t k_begin, k_end;  // the range to add; multiples of 256, except k_end == k
    Quantised a;             // integer formats: activations, from the tile's first row
    const float* x;          // float formats: activations [rows][x_stride]
    const uint16_t* x_bf16;  // BF16 weights on ISAs that multiply bf16: [rows][x_stride]
    int64_t x_stride;
    bool prefetch;  // the weights come from memory
    // out = start + W x, both [rows][stride] of 16 values each; they may be the same. A start with stride 0
    // is one for all rows.
    const float* start;
    int64_t start_stride;
    float* out;
    int64_t out_stride;
};

// Bytes that tiles read ahead, into L2. A processor drops a prefetch while its buffers for misses are taken,
// so every line is asked for four times on its way.
inline constexpr size_t kAhead = 2048, kFarthest = 4 * kAhead;

using LinearKernel = void (*)(const LinearTile&);

inline constexpr int kMaxTileRows = 10;

struct LinearBlock {
    int64_t min_rows = 0;        // fewer rows are faster in tiles, or are not allowed to be in a block
    LinearKernel run = nullptr;  // null: there is none
    // A thread configures its tile unit before the first `run` with so many rows, and releases it after the
    // last.
    void (*configure)(int64_t rows) = nullptr;
    void (*release)() = nullptr;

    bool takes(int64_t rows) const { return run != nullptr && rows >= min_rows; }
};

// The kernels of one format on one ISA.
struct LinearKernels {
    int max_rows = 0;
    LinearKernel tile[kMaxTileRows] = {};  // [rows - 1]
    int max_two_byte_rows = 0;             // 0: the format has no kernels for two-byte activations
    LinearKernel two_byte_tile[kMaxTileRows] = {};
    LinearBlock block, two_byte_block;
    bool bf16_activations = false;  // reads x_bf16, not x
};

LinearKernels linear_kernels(Isa isa, Format format);

}  // namespace treadle
