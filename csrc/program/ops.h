// The operations that programs are built of. Widths and types are checked by Program, which makes them.
#pragma once

#include <atomic>
#include <memory>
#include <vector>

#include "kernels/attention/attention.h"
#include "kernels/linear/linear.h"
#include "kernels/rows/rows.h"
#include "program/op.h"
#include "quant/pack.h"

namespace treadle {

// out[row] = table[token], straight from the model file.
class EmbedOp : public Op {
public:
    EmbedOp(Format format, const uint8_t* table, Buffer& out) : format_(format), table_(table), out_(out) {}
    int64_t plan(const Step& step) override;
    void run(const Step& step, int64_t chunk, uint8_t* scratch) override;

private:
    Format format_;
    const uint8_t* table_;
    Buffer& out_;
};

// out = x for the rows whose logits are wanted.
class SelectOp : public Op {
public:
    SelectOp(const Buffer& x, Buffer& out) : x_(x), out_(out) {}
    int64_t plan(const Step& step) override;
    void run(const Step& step, int64_t chunk, uint8_t* scratch) override;

private:
    const Buffer& x_;
    Buffer& out_;
};

// out = RMSNorm(x) * weight, and any further forms of it in the same pass.
class RmsNormOp : public Op {
public:
    RmsNormOp(const RowKernels& kernels, const Buffer& x, std::vector<float> weight, float eps, Buffer& out)
        : kernels_(kernels), x_(x), weight_(std::move(weight)), eps_(eps), out_(out) {}
    void emit(Form form) { forms_.push_back(form); }
    int64_t plan(const Step& step) override;
    void run(const Step& step, int64_t chunk, uint8_t* scratch) override;

private:
    const RowKernels& kernels_;
    const Buffer& x_;
    std::vector<float> weight_;
    float eps_;
    Buffer& out_;
    std::vector<Form> forms_;
};

// A further form of a buffer.
class ConvertOp : public Op {
public:
    ConvertOp(const RowKernels& kernels, const Buffer& x, Form form)
        : kernels_(kernels), x_(x), form_(form) {}
    int64_t plan(const Step& step) override;
    void run(const Step& step, int64_t chunk, uint8_t* scratch) override;

private:
    const RowKernels& kernels_;
    const Buffer& x_;
    Form form_;
};

// One weight matrix of a linear operation.
struct LinearPart {
    std::shared_ptr<const Matrix> matrix;
    const LinearKernel* tile;  // [rows - 1]
    int max_rows;
    LinearBlock block;
    Form form;
};

// out = [W0 x; W1 x; ...] + bias + residual, or silu(W0 x) * (W1 x) when gated.
class LinearOp : public Op {
public:
    struct Epilogue {
        std::vector<float> bias;           // empty, or one value per output
        const Buffer* residual = nullptr;  // may be the output itself
        bool gated = false;
    };
    LinearOp(const RowKernels& rows, const Buffer& x, std::vector<LinearPart> parts, Epilogue epilogue,
             Buffer& out)
        : rows_(rows), x_(x), parts_(std::move(parts)), epilogue_(std::move(epilogue)), out_(out) {
        part_columns_.push_back(0);
        for (const LinearPart& part : parts_)
            part_columns_.push_back(part_columns_.back() + part.matrix->rows);
    }
    int64_t plan(const Step& step) override;
    void run(const Step& step, int64_t chunk, uint8_t* scratch) override;

private:
    struct Range {
        int part;
        int64_t panel_begin, panel_end, row_begin, row_end;
    };
    Range range(int64_t chunk) const;
    // Where a product goes and what it is added to, from the first row and panel of a range.
    struct Target {
        const float* start;
        int64_t start_stride, start_panel;  // between rows, between panels
        float* out;
        int64_t out_stride, out_panel;
    };
    void multiply(const LinearPart& part, const Range& range, const Target& to) const;
    void multiply_into_output(const Range& range) const;
    void multiply_last_panel(const Range& range, float* tile) const;
    void multiply_gated(const Range& range, float* tile) const;

    const RowKernels& rows_;
    const Buffer& x_;
    std::vector<LinearPart> parts_;
    std::vector<int64_t> part_columns_;  // [parts + 1]: where each part's outputs begin
    Epilogue epilogue_;
    Buffer& out_;
    int64_t step_rows_ = 0, chunk_panels_ = 1, chunk_rows_ = 1, row_chunks_ = 1;
};

// Shapes of grouped-query attention.
struct AttentionShape {
    int heads, kv_heads, head_dim;
};

// cos and sin [row][pairs] of every row's position.
class AnglesOp : public Op {
public:
    AnglesOp(std::vector<float> frequency, float magnitude, int64_t max_rows);
    int64_t plan(const Step& step) override;
    void run(const Step& step, int64_t chunk, uint8_t* scratch) override;
    int64_t pairs() const { return static_cast<int64_t>(frequency_.size()); }
    const float* cos(int64_t row) const { return table_.as<float>() + row * 2 * pairs(); }
    const float* sin(int64_t row) const { return cos(row) + pairs(); }

private:
    std::vector<float> frequency_;
    float magnitude_;
    Memory table_;
};

// One layer's keys and values, see kernels/attention/attention.h.
struct CacheLayer {
    uint8_t* data;         // [blocks][kv_heads][head_block_bytes]
    int64_t block_stride;  // bytes between blocks
    int64_t head_stride;   // bytes between kv heads
};

// The queries of a step, in the form that attention kernels read.
struct Queries {
    uint8_t* data;  // [rows][heads][bytes]
    int heads;
    int64_t bytes;

    uint8_t* row(int64_t row, int head) const { return data + (row * heads + head) * bytes; }
};

// Turns the fused q, k, v of every row into a query and a cache entry: per-head norm if given, rotary
// embedding, rotation if the cache wants it. Overwrites them.
class CacheOp : public Op {
public:
    struct HeadNorm {
        std::vector<float> q, k;  // empty: none
        float eps = 0;
    };
    CacheOp(const RowKernels& rows, const AttentionKernels& attention, const AttentionShape& shape,
            const Buffer& qkv, const AnglesOp& angles, bool neox, HeadNorm norm, CacheLayer cache,
            Queries queries)
        : rows_(rows), attention_(attention), shape_(shape), qkv_(qkv), angles_(angles), neox_(neox),
          norm_(std::move(norm)), cache_(cache), queries_(queries) {}
    int64_t plan(const Step& step) override;
    void run(const Step& step, int64_t chunk, uint8_t* scratch) override;

private:
    const RowKernels& rows_;
    const AttentionKernels& attention_;
    AttentionShape shape_;
    const Buffer& qkv_;
    const AnglesOp& angles_;
    bool neox_;
    HeadNorm norm_;
    CacheLayer cache_;
    Queries queries_;
};

// How a step's attention is cut into chunks; the same for every layer, so made once per step.
struct AttentionPlan {
    struct Item {
        int sequence, kv_head;
        int64_t first_row, tokens;       // queries, rows of the step
        int64_t split_begin, split_end;  // splits computed by this item
        int group;        // items that share queries and are merged; -1 when the item has all splits
        int64_t partial;  // where the partial results go, in floats
    };
    std::vector<Item> items;
    std::vector<std::pair<int64_t, int64_t>> groups;  // first item and count
    std::vector<float> partials;
    std::unique_ptr<std::atomic<int>[]> finished;  // per group; back to zero when the group is merged
    size_t finished_size = 0;

    void make(const Step& step, const AttentionShape& shape);
};

class AttentionOp : public Op {
public:
    // The first layer's operation makes the plan.
    AttentionOp(const AttentionKernels& kernels, const AttentionShape& shape,
                std::shared_ptr<AttentionPlan> plan, bool makes_plan, CacheLayer cache, Queries queries,
                Buffer& out)
        : kernels_(kernels), shape_(shape), plan_(std::move(plan)), makes_plan_(makes_plan), cache_(cache),
          queries_(queries), out_(out) {}
    int64_t plan(const Step& step) override;
    void run(const Step& step, int64_t chunk, uint8_t* scratch) override;

private:
    struct Partial {
        float *max, *sum, *out;
    };
    Partial partial_at(float* memory, int64_t rows) const;
    int64_t rows(const AttentionPlan::Item& item) const;
    void split(const Step& step, const AttentionPlan::Item& item, int64_t index, const Partial& to) const;
    void merge(const Partial& a, const Partial& b, int64_t rows) const;
    void write(const AttentionPlan::Item& item, const Partial& result) const;

    const AttentionKernels& kernels_;
    AttentionShape shape_;
    std::shared_ptr<AttentionPlan> plan_;
    bool makes_plan_;
    CacheLayer cache_;
    Queries queries_;
    Buffer& out_;
};

}  // namespace treadle
