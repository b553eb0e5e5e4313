#include <algorithm>
#include <cmath>

#include "program/ops.h"

namespace treadle {

int64_t CacheOp::plan(const Step& step) { return step.rows(); }

void CacheOp::run(const Step& step, int64_t row, uint8_t*) {
    const auto [heads, kv_heads, dim] = shape_;
    float* q = qkv_.row(row);
    float* k = q + heads * dim;
    float* v = k + kv_heads * dim;
    const float *cos = angles_.cos(row), *sin = angles_.sin(row);
    const int64_t rotated = 2 * angles_.pairs();
    for (int h = 0; h < heads; ++h) {
        float* head = q + h * dim;
        if (!norm_.q.empty()) rows_.rms_norm(head, norm_.q.data(), dim, norm_.eps, head);
        rows_.rope(head, rotated, cos, sin, neox_);
        if (attention_.rotate) attention_.rotate(head, dim);
        attention_.query(head, dim, queries_.row(row, h));
    }

    const int64_t position = step.position(row);
    const int32_t id = step.sequences[step.row_sequence[row]].table[position / kBlock];
    uint8_t* block = cache_.data + id * cache_.block_stride;
    for (int h = 0; h < kv_heads; ++h) {
        float* head = k + h * dim;
        if (!norm_.k.empty()) rows_.rms_norm(head, norm_.k.data(), dim, norm_.eps, head);
        rows_.rope(head, rotated, cos, sin, neox_);
        if (attention_.rotate) {
            attention_.rotate(head, dim);
            attention_.rotate(v + h * dim, dim);
        }
        attention_.store(head, v + h * dim, dim, block + h * cache_.head_stride,
                         static_cast<int>(position % kBlock));
    }
}

void AttentionPlan::make(const Step& step, const AttentionShape& shape) {
    items.clear();
    groups.clear();
    int64_t partial = 0;
    const int heads_per_kv = shape.heads / shape.kv_heads;
    const int64_t tile = std::max(1, kMaxAttentionRows / heads_per_kv);
    for (size_t s = 0; s < step.sequences.size(); ++s) {
        const StepSequence& sequence = step.sequences[s];
        for (int64_t begin = 0; begin < sequence.query_len; begin += tile) {
            const int64_t tokens = std::min(tile, sequence.query_len - begin);
            const int64_t splits = (sequence.past_len + begin + tokens + kSplit - 1) / kSplit;
            for (int kv_head = 0; kv_head < shape.kv_heads; ++kv_head) {
                Item item{static_cast<int>(s), kv_head, sequence.first_row + begin, tokens, 0, splits, -1, 0};
                // A prompt has tiles enough for all workers; a decode is cut into splits.
                if (splits == 1 || sequence.query_len > tile) {
                    items.push_back(item);
                    continue;
                }
                item.group = static_cast<int>(groups.size());
                groups.emplace_back(items.size(), splits);
                for (int64_t split = 0; split < splits; ++split) {
                    item.split_begin = split;
                    item.split_end = split + 1;
                    item.partial = partial;
                    partial += tokens * heads_per_kv * (shape.head_dim + 2);
                    items.push_back(item);
                }
            }
        }
    }
    if (partials.size() < static_cast<size_t>(partial)) partials.resize(partial);
    if (finished_size < groups.size()) {
        finished_size = groups.size() * 2;
        finished = std::make_unique<std::atomic<int>[]>(finished_size);
    }
}

int64_t AttentionOp::plan(const Step& step) {
    if (makes_plan_) plan_->make(step, shape_);
    return static_cast<int64_t>(plan_->items.size());
}

int64_t AttentionOp::rows(const AttentionPlan::Item& item) const {
    return item.tokens * (shape_.heads / shape_.kv_heads);
}

AttentionOp::Partial AttentionOp::partial_at(float* memory, int64_t rows) const {
    return {memory, memory + rows, memory + 2 * rows};
}

void AttentionOp::split(const Step& step, const AttentionPlan::Item& item, int64_t index,
                        const Partial& to) const {
    const StepSequence& sequence = step.sequences[item.sequence];
    const int per_kv = shape_.heads / shape_.kv_heads;
    const int64_t first =
        item.first_row - sequence.first_row + sequence.past_len;  // position of the first query
    const uint8_t* query[kMaxAttentionRows];
    int64_t limit[kMaxAttentionRows];
    for (int64_t token = 0; token < item.tokens; ++token) {
        for (int h = 0; h < per_kv; ++h) {
            query[token * per_kv + h] = queries_.row(item.first_row + token, item.kv_head * per_kv + h);
            limit[token * per_kv + h] = first + token + 1;
        }
    }
    const int64_t begin = index * kSplit;
    kernels_.split({
        .query = query,
        .limit = limit,
        .rows = static_cast<int>(rows(item)),
        .head_dim = shape_.head_dim,
        .scale = static_cast<float>(1.4426950408889634 / std::sqrt(static_cast<double>(shape_.head_dim))),
        .cache = cache_.data + item.kv_head * cache_.head_stride,
        .block_stride = cache_.block_stride,
        .table = sequence.table,
        .begin = begin,
        .end = std::min(begin + kSplit, first + item.tokens),
        .max = to.max,
        .sum = to.sum,
        .out = to.out,
    });
}

void AttentionOp::merge(const Partial& a, const Partial& b, int64_t rows) const {
    for (int64_t r = 0; r < rows; ++r)
        kernels_.merge(a.max + r, a.sum + r, a.out + r * shape_.head_dim, b.max[r], b.sum[r],
                       b.out + r * shape_.head_dim, shape_.head_dim);
}

void AttentionOp::write(const AttentionPlan::Item& item, const Partial& result) const {
    const int per_kv = shape_.heads / shape_.kv_heads, dim = shape_.head_dim;
    for (int64_t r = 0; r < rows(item); ++r) {
        float* out = out_.row(item.first_row + r / per_kv) + (item.kv_head * per_kv + r % per_kv) * dim;
        const float factor = 1.0f / result.sum[r];
        for (int d = 0; d < dim; ++d) out[d] = result.out[r * dim + d] * factor;
        if (kernels_.rotate) kernels_.rotate(out, dim);
    }
}

void AttentionOp::run(const Step& step, int64_t chunk, uint8_t* scratch) {
    const AttentionPlan::Item& item = plan_->items[chunk];
    const int64_t count = rows(item);
    if (item.group < 0) {
        const Partial total = partial_at(reinterpret_cast<float*>(scratch), count);
        const Partial next = partial_at(total.out + count * shape_.head_dim, count);
        split(step, item, 0, total);
        for (int64_t index = 1; index < item.split_end; ++index) {
            split(step, item, index, next);
            merge(total, next, count);
        }
        return write(item, total);
    }
    split(step, item, item.split_begin, partial_at(plan_->partials.data() + item.partial, count));
    // Whoever finishes last merges, in order.
    const auto [first, splits] = plan_->groups[item.group];
    std::atomic<int>& finished = plan_->finished[item.group];
    if (finished.fetch_add(1, std::memory_order_acq_rel) + 1 != splits) return;
    finished.store(0, std::memory_order_relaxed);
    const Partial total = partial_at(plan_->partials.data() + plan_->items[first].partial, count);
    for (int64_t i = 1; i < splits; ++i)
        merge(total, partial_at(plan_->partials.data() + plan_->items[first + i].partial, count), count);
    write(item, total);
}

}  // namespace treadle
