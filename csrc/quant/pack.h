// Packed matrices: what the linear kernels read. The layouts are described in quant/format.h.
#pragma once

#include <cstdint>

#include "base/memory.h"
#include "quant/format.h"

namespace treadle {

class Pool;

struct Matrix {
    Format format;
    int64_t rows;  // output features; the last panel is padded with zero weights
    int64_t cols;  // input features
    Memory memory;

    int64_t panels() const { return (rows + kPanel - 1) / kPanel; }
    size_t stride() const { return panel_bytes(format, cols); }
    const uint8_t* panel(int64_t index) const { return memory.data() + index * stride(); }
};

// Packs row-major file data, rows [rows] x file_bytes(format, cols). Throws std::invalid_argument when `cols`
// is not a whole number of blocks. `mapped`: `data` is in a mapped file, and its pages are given back to the
// system as they are packed, so that loading never holds the weights twice.
Matrix pack(Pool& pool, Format format, const uint8_t* data, int64_t rows, int64_t cols, bool mapped = false);

}  // namespace treadle
