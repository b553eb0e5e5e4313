#include <algorithm>
#include <cstring>

#include "program/ops.h"
#include "program/program.h"

namespace treadle {

namespace {

// Weights per chunk when all rows are in it: a claim (tens of ns, contended) stays under 2 % of reading them
// at 12 GB/s, and a worker that loses its core delays the others by a chunk only.
constexpr size_t kChunkBytes = size_t{64} << 10;
constexpr int64_t kChunkPanels = 8;
// Rows per chunk: four tiles. The panels of the chunk stay in L2 for all of them, and for the next chunk,
// which has other rows. A block unpacks the weights once for all its rows.
constexpr int64_t kChunkRows = 4 * kMaxTileRows, kBlockChunkRows = 4 * kChunkRows;
// Range of K per pass: a tile's activations take at most 20 KiB of a 32 KiB L1, where all panels of the chunk
// find them; the panels stream from L2.
constexpr int64_t kPassK = 2048;

constexpr float kZeros[kPanel] = {};

}  // namespace

int64_t LinearOp::plan(const Step& step) {
    step_rows_ = x_.rows(step);
    if (step_rows_ == 0) return 0;
    const int sides = epilogue_.gated ? 2 : 1;
    // Equal chunks of rows rather than full ones and a rest.
    const int64_t most = parts_[0].block.run != nullptr ? kBlockChunkRows : kChunkRows;
    row_chunks_ = (step_rows_ + most - 1) / most;
    chunk_rows_ = (step_rows_ + row_chunks_ - 1) / row_chunks_;
    const int64_t few = kChunkBytes / (parts_[0].matrix->stride() * sides);
    chunk_panels_ = row_chunks_ > 1 ? kChunkPanels / sides : std::clamp<int64_t>(few, 1, kChunkPanels);
    chunk_panels_ = std::min<int64_t>(
        chunk_panels_, kScratchBytes / (chunk_rows_ * sides * kPanel * static_cast<int64_t>(sizeof(float))));
    int64_t total = 0;
    const size_t count = epilogue_.gated ? 1 : parts_.size();
    for (size_t i = 0; i < count; ++i)
        total += (parts_[i].matrix->panels() + chunk_panels_ - 1) / chunk_panels_ * row_chunks_;
    return total;
}

LinearOp::Range LinearOp::range(int64_t chunk) const {
    for (int part = 0;; ++part) {
        const int64_t panels = parts_[part].matrix->panels();
        const int64_t chunks = (panels + chunk_panels_ - 1) / chunk_panels_ * row_chunks_;
        if (chunk >= chunks) {
            chunk -= chunks;
            continue;
        }
        const int64_t panel = chunk / row_chunks_ * chunk_panels_, row = chunk % row_chunks_ * chunk_rows_;
        return {part, panel, std::min(panel + chunk_panels_, panels), row,
                std::min(row + chunk_rows_, step_rows_)};
    }
}

void LinearOp::multiply(const LinearPart& part, const Range& range, const Target& to) const {
    const Matrix& matrix = *part.matrix;
    const int64_t rows = range.row_end - range.row_begin, panels = range.panel_end - range.panel_begin;
    const bool block = part.block.takes(rows);
    // Equal tiles rather than full ones and a rest.
    const int64_t tiles = block ? 1 : (rows + part.max_rows - 1) / part.max_rows;
    const int64_t passes = (matrix.cols + kPassK - 1) / kPassK;
    const bool integers = part.form != Form::floats && part.form != Form::bf16;
    const Quantised x = integers ? x_.quantised(part.form, range.row_begin) : Quantised{};
    LinearTile t{};
    t.k = matrix.cols;
    t.x_stride = x_.stride();
    t.out_stride = to.out_stride;
    if (block) part.block.configure(rows);
    for (int64_t pass = 0; pass < passes; ++pass) {
        t.k_begin = pass * kPassK;
        t.k_end = std::min(t.k_begin + kPassK, matrix.cols);
        t.start_stride = pass > 0 ? to.out_stride : to.start_stride;
        for (int64_t i = 0; i < tiles; ++i) {
            const int64_t begin = rows * i / tiles;
            if (integers)
                t.a = x.from_row(begin);
            else if (part.form == Form::bf16)
                t.x_bf16 = x_.bf16_row(range.row_begin + begin);
            else
                t.x = x_.row(range.row_begin + begin);
            t.rows = rows * (i + 1) / tiles - begin;
            t.prefetch = i == 0;  // the next tiles find the weights in L2
            const LinearKernel kernel = block ? part.block.run : part.tile[t.rows - 1];
            for (int64_t panel = 0; panel < panels; ++panel) {
                t.panel = matrix.panel(range.panel_begin + panel);
                t.out = to.out + panel * to.out_panel + begin * to.out_stride;
                t.start = pass > 0 ? t.out : to.start + panel * to.start_panel + begin * to.start_stride;
                kernel(t);
            }
        }
    }
    if (block) part.block.release();
}

// Whole panels straight into the output, started from the residual or the bias.
void LinearOp::multiply_into_output(const Range& range) const {
    const int64_t column = part_columns_[range.part] + range.panel_begin * kPanel;
    Target to{kZeros, 0, 0, out_.row(range.row_begin) + column, out_.stride(), kPanel};
    const float* bias = epilogue_.bias.empty() ? nullptr : epilogue_.bias.data() + column;
    if (epilogue_.residual != nullptr) {
        to.start = epilogue_.residual->row(range.row_begin) + column;
        to.start_stride = epilogue_.residual->stride();
        to.start_panel = kPanel;
    } else if (bias != nullptr) {
        to.start = bias;
        to.start_panel = kPanel;
    }
    multiply(parts_[range.part], range, to);
    if (epilogue_.residual == nullptr || bias == nullptr) return;
    const int64_t columns = (range.panel_end - range.panel_begin) * kPanel;
    for (int64_t row = range.row_begin; row < range.row_end; ++row) {
        float* out = out_.row(row) + column;
        for (int64_t i = 0; i < columns; ++i) out[i] += bias[i];
    }
}

// The panel that has fewer than 16 outputs, by way of the scratch tile.
void LinearOp::multiply_last_panel(const Range& range, float* tile) const {
    multiply(parts_[range.part], range, {kZeros, 0, 0, tile, kPanel, 0});
    const int64_t begin = part_columns_[range.part] + range.panel_begin * kPanel;
    const int64_t end = part_columns_[range.part + 1];
    for (int64_t row = range.row_begin; row < range.row_end; ++row, tile += kPanel) {
        for (int64_t i = begin; i < end; ++i) {
            float y = tile[i - begin];
            if (epilogue_.residual != nullptr) y += epilogue_.residual->row(row)[i];
            if (!epilogue_.bias.empty()) y += epilogue_.bias[i];
            out_.row(row)[i] = y;
        }
    }
}

void LinearOp::multiply_gated(const Range& range, float* tile) const {
    const int64_t rows = range.row_end - range.row_begin, panels = range.panel_end - range.panel_begin;
    float* gate = tile;  // [panel][row][16]
    float* up = tile + panels * rows * kPanel;
    multiply(parts_[0], range, {kZeros, 0, 0, gate, kPanel, rows * kPanel});
    multiply(parts_[1], range, {kZeros, 0, 0, up, kPanel, rows * kPanel});
    rows_.swiglu(gate, up, panels * rows * kPanel, gate);
    for (int64_t panel = 0; panel < panels; ++panel) {
        const int64_t column = (range.panel_begin + panel) * kPanel;
        const int64_t count = parts_[0].matrix->rows - column;
        for (int64_t row = 0; row < rows; ++row) {
            const float* from = gate + (panel * rows + row) * kPanel;
            float* out = out_.row(range.row_begin + row) + column;
            if (count >= kPanel)
                std::memcpy(out, from, kPanel * sizeof(float));
            else
                std::copy_n(from, count, out);
        }
    }
}

void LinearOp::run(const Step&, int64_t chunk, uint8_t* scratch) {
    Range range = this->range(chunk);
    float* tile = reinterpret_cast<float*>(scratch);
    if (epilogue_.gated) return multiply_gated(range, tile);
    const int64_t whole = parts_[range.part].matrix->rows / kPanel, end = range.panel_end;
    range.panel_end = std::min(end, whole);
    if (range.panel_begin < range.panel_end) multiply_into_output(range);
    if (end <= whole) return;
    range.panel_begin = whole;
    range.panel_end = end;
    multiply_last_panel(range, tile);
}

}  // namespace treadle
