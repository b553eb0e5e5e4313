#include <algorithm>
#include <cstring>

#include "program/ops.h"
#include "program/program.h"

namespace treadle {

namespace {

// Weights per chunk when there are few rows: a claim (tens of ns, contended) stays under 2 % of reading them
// at 12 GB/s, and a worker that loses its core delays the others by a chunk only.
constexpr size_t kChunkBytes = size_t{64} << 10;
// Panels per chunk when there are many rows: the block of activations is read from L3 once per so many
// panels.
constexpr int64_t kChunkPanels = 8;
// Range of K per pass: a tile's activations take 12 KiB and a panel's weights 9 KiB (4-bit) of a 32 KiB L1,
// so that the next tile finds the weights there; with 512 rows the activations of a pass take 512 KiB, half
// of a 1 MiB L2.
constexpr int64_t kPassK = 1024;
// Rows from which compute, not memory, is the limit.
constexpr int64_t kManyRows = 33;

}  // namespace

int64_t LinearOp::plan(const Step& step, int workers) {
    step_rows_ = x_.rows(step);
    if (step_rows_ == 0) return 0;
    const int sides = epilogue_.gated ? 2 : 1;
    int64_t panels = 0;
    for (const LinearPart& part : parts_) panels += part.matrix->panels();
    panels /= sides;
    chunk_rows_ = step_rows_;
    if (step_rows_ < kManyRows) {
        const size_t stride = parts_[0].matrix->stride() * sides;
        chunk_panels_ = std::clamp<int64_t>(kChunkBytes / stride, 1, kChunkPanels);
    } else {
        chunk_panels_ = kChunkPanels / sides;
        // Few columns for many workers: cut the rows too, down to about a hundred, a whole number of tiles.
        const int64_t chunks = (panels + chunk_panels_ - 1) / chunk_panels_;
        while (chunk_rows_ > 10 * kMaxTileRows &&
               chunks * ((step_rows_ + chunk_rows_ - 1) / chunk_rows_) < 4 * workers)
            chunk_rows_ = (chunk_rows_ / 2 + kMaxTileRows - 1) / kMaxTileRows * kMaxTileRows;
    }
    chunk_panels_ = std::min<int64_t>(
        chunk_panels_, kScratchBytes / (chunk_rows_ * sides * kPanel * static_cast<int64_t>(sizeof(float))));
    row_chunks_ = (step_rows_ + chunk_rows_ - 1) / chunk_rows_;
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

// tile[panel][row][16] = W x
void LinearOp::multiply(const LinearPart& part, const Range& range, float* tile) const {
    const Matrix& matrix = *part.matrix;
    const int64_t rows = range.row_end - range.row_begin, panels = range.panel_end - range.panel_begin;
    std::memset(tile, 0, panels * rows * kPanel * sizeof(float));
    // Equal tiles rather than full ones and a rest.
    const int64_t tiles = (rows + part.max_rows - 1) / part.max_rows;
    const int64_t passes = (matrix.cols + kPassK - 1) / kPassK;
    LinearTile t{};
    t.k = matrix.cols;
    t.x_stride = x_.stride();
    t.out_stride = kPanel;
    const auto multiply_pass = [&](int64_t panel, int64_t pass) {
        t.panel = matrix.panel(range.panel_begin + panel);
        t.k_begin = pass * kPassK;
        t.k_end = std::min(t.k_begin + kPassK, matrix.cols);
        for (int64_t i = 0; i < tiles; ++i) {
            const int64_t begin = rows * i / tiles, end = rows * (i + 1) / tiles;
            const int64_t row = range.row_begin + begin;
            switch (part.form) {
            case Form::floats: t.x = x_.row(row); break;
            case Form::bf16: t.x_bf16 = x_.bf16_row(row); break;
            default: t.a = x_.quantised(part.form, row);
            }
            // One row is all reading, and the hardware's own prefetcher is better at that; the second tile of
            // a few rows finds the weights in L1, and many rows in L2.
            t.prefetch = i == 0 && rows > 1 && rows < kManyRows;
            t.out = tile + (panel * rows + begin) * kPanel;
            part.tile[end - begin - 1](t);
        }
    };
    if (rows < kManyRows) {
        // Weights come from memory: one sequential stream.
        for (int64_t panel = 0; panel < panels; ++panel)
            for (int64_t pass = 0; pass < passes; ++pass) multiply_pass(panel, pass);
    } else {
        // Activations come from L3: once per pass for all panels of the chunk.
        for (int64_t pass = 0; pass < passes; ++pass)
            for (int64_t panel = 0; panel < panels; ++panel) multiply_pass(panel, pass);
    }
}

// out[0..16) = sums [+ bias] [+ residual]; `out` may be `residual`.
template <bool kBias, bool kResidual>
void LinearOp::finish_panel(const Range& range, int64_t column, const float* sums) const {
    for (int64_t row = range.row_begin; row < range.row_end; ++row, sums += kPanel) {
        float* out = out_.row(row) + column;
        const float* residual = kResidual ? epilogue_.residual->row(row) + column : nullptr;
        float y[kPanel];
        for (int i = 0; i < kPanel; ++i) {
            y[i] = sums[i];
            if constexpr (kBias) y[i] += epilogue_.bias[column + i];
            if constexpr (kResidual) y[i] += residual[i];
        }
        std::memcpy(out, y, sizeof y);
    }
}

void LinearOp::finish(const Range& range, const float* tile) const {
    const int64_t rows = range.row_end - range.row_begin;
    const int64_t part_begin = part_columns_[range.part], part_end = part_columns_[range.part + 1];
    const bool bias = !epilogue_.bias.empty(), residual = epilogue_.residual != nullptr;
    for (int64_t panel = range.panel_begin; panel < range.panel_end; ++panel, tile += rows * kPanel) {
        const int64_t column = part_begin + panel * kPanel;
        if (column + kPanel <= part_end) {
            if (bias && residual)
                finish_panel<true, true>(range, column, tile);
            else if (bias)
                finish_panel<true, false>(range, column, tile);
            else if (residual)
                finish_panel<false, true>(range, column, tile);
            else
                finish_panel<false, false>(range, column, tile);
            continue;
        }
        for (int64_t row = 0; row < rows; ++row)
            for (int64_t i = column; i < part_end; ++i) {
                float y = tile[row * kPanel + i - column];
                if (bias) y += epilogue_.bias[i];
                if (residual) y += epilogue_.residual->row(range.row_begin + row)[i];
                out_.row(range.row_begin + row)[i] = y;
            }
    }
}

void LinearOp::run(const Step&, int64_t chunk, uint8_t* scratch) {
    const Range range = this->range(chunk);
    float* tile = reinterpret_cast<float*>(scratch);
    multiply(parts_[range.part], range, tile);
    if (!epilogue_.gated) return finish(range, tile);
    const int64_t rows = range.row_end - range.row_begin, panels = range.panel_end - range.panel_begin;
    const float* gate = tile;
    float* up = tile + panels * rows * kPanel;
    multiply(parts_[1], range, up);
    for (int64_t panel = 0; panel < panels; ++panel) {
        const int64_t column = (range.panel_begin + panel) * kPanel;
        const int64_t count = std::min<int64_t>(kPanel, parts_[0].matrix->rows - column);
        for (int64_t row = 0; row < rows; ++row) {
            const int64_t at = (panel * rows + row) * kPanel;
            rows_.swiglu(gate + at, up + at, count, out_.row(range.row_begin + row) + column);
        }
    }
}

}  // namespace treadle
