// The readable reference: softmax(q k^T * scale) v of one row at a time over the bf16 cache, in float.
#include <algorithm>
#include <cmath>
#include <limits>

#include "base/half.h"
#include "kernels/attention/attention.h"

namespace treadle::ref {

namespace {

float key_at(const uint16_t* block, int slot, int d) {
    return bf16_to_float(block[(d / 2 * kBlock + slot) * 2 + d % 2]);
}

size_t value_index(int head_dim, int slot, int d) {
    return static_cast<size_t>(kBlock) * head_dim + (slot / 2 * head_dim + d) * 2 + slot % 2;
}

void split(const AttentionSplit& a) {
    for (int r = 0; r < a.rows; ++r) {
        float* out = a.out + r * a.head_dim;
        std::fill(out, out + a.head_dim, 0.0f);
        a.sum[r] = 0;
        a.max[r] = -std::numeric_limits<float>::infinity();
        const int64_t end = std::min(a.end, a.limit[r]);
        const auto block_of = [&](int64_t key) { return a.cache + a.table[key / kBlock] * a.block_stride; };
        const auto score = [&](int64_t key) {
            float dot = 0;
            for (int d = 0; d < a.head_dim; ++d)
                dot +=
                    bf16_to_float(a.query[r][d]) * key_at(block_of(key), static_cast<int>(key % kBlock), d);
            return dot * a.scale;
        };
        for (int64_t key = a.begin; key < end; ++key) a.max[r] = std::max(a.max[r], score(key));
        for (int64_t key = a.begin; key < end; ++key) {
            const float p = std::exp2(score(key) - a.max[r]);
            a.sum[r] += p;
            const float rounded = bf16_to_float(float_to_bf16(p));
            for (int d = 0; d < a.head_dim; ++d)
                out[d] +=
                    rounded *
                    bf16_to_float(block_of(key)[value_index(a.head_dim, static_cast<int>(key % kBlock), d)]);
        }
    }
}

void merge(float* max_a, float* sum_a, float* out_a, float max_b, float sum_b, const float* out_b,
           int head_dim) {
    if (sum_b == 0.0f) return;
    const float max = std::max(*max_a, max_b);
    const float shrink_a = std::exp2(*max_a - max), shrink_b = std::exp2(max_b - max);
    *sum_a = *sum_a * shrink_a + sum_b * shrink_b;
    *max_a = max;
    for (int d = 0; d < head_dim; ++d) out_a[d] = out_a[d] * shrink_a + out_b[d] * shrink_b;
}

void store(const float* key, const float* value, int head_dim, uint16_t* block, int slot) {
    for (int d = 0; d < head_dim; ++d) {
        block[(d / 2 * kBlock + slot) * 2 + d % 2] = float_to_bf16(key[d]);
        block[value_index(head_dim, slot, d)] = float_to_bf16(value[d]);
    }
}

}  // namespace

AttentionKernels attention_kernels() { return {split, merge, store}; }

}  // namespace treadle::ref
