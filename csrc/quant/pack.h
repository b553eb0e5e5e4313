// Packed matrices: what the linear kernels read. The layouts are described in quant/format.h.
#pragma once

#include <cstdint>
#include <memory>

#include "quant/format.h"

namespace treadle {

class Pool;

// Number of the packed layouts of quant/format.h, for copies of them that outlive a process: to be raised
// with every change of a byte (tests/kernels/test_packed_layout.py).
inline constexpr int kPackedLayout = 1;
// Packed data begins at a multiple of this: a cache line, and a 512-bit vector.
inline constexpr size_t kPackedAlign = 64;

struct Matrix {
    Format format;
    int64_t rows;                       // output features; the last panel is padded with zero weights
    int64_t cols;                       // input features
    const uint8_t* data;                // the panels
    std::shared_ptr<const void> owner;  // of `data`

    int64_t panels() const { return (rows + kPanel - 1) / kPanel; }
    size_t stride() const { return panel_bytes(format, cols); }
    size_t bytes() const { return panels() * stride(); }
    const uint8_t* panel(int64_t index) const { return data + index * stride(); }
};

// Packs row-major file data, rows [rows] x file_bytes(format, cols). Throws std::invalid_argument when `cols`
// is not a whole number of blocks. `mapped`: `data` is in a mapped file, and its pages are given back to the
// system as they are packed, so that loading never holds the weights twice.
Matrix pack(Pool& pool, Format format, const uint8_t* data, int64_t rows, int64_t cols, bool mapped = false);

// The same matrix in anonymous memory, in huge pages where the system grants them.
Matrix copy(Pool& pool, const Matrix& matrix);

// Sums up `data`, with all workers, in a number that changes with every change of a single 32-bit word, and
// with other changes almost always. What is in a mapped file is mapped on the way, in large steps.
uint64_t checksum(Pool& pool, const uint8_t* data, size_t bytes);

}  // namespace treadle
