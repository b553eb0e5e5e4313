// The readable reference: softmax(q k^T * scale) v of one row at a time over the cache, in float.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include "base/half.h"
#include "kernels/attention/attention.h"

namespace treadle::ref {

namespace {

uint16_t get16(const uint8_t* p) {
    uint16_t value;
    std::memcpy(&value, p, 2);
    return value;
}

void put16(uint8_t* p, uint16_t value) { std::memcpy(p, &value, 2); }

// Where the numbers of a block are.
struct Bf16 {
    static constexpr KvType kType = KvType::bf16;
    static int64_t key(int, int slot, int d) { return 2 * ((d / 2 * kBlock + slot) * 2 + d % 2); }
    static int64_t value(int dim, int slot, int d) {
        return 2 * (kBlock * dim + (slot / 2 * dim + d) * 2 + slot % 2);
    }
    static float read(const uint8_t* block, int64_t at, int, int, int) {
        return bf16_to_float(get16(block + at));
    }
    static float query(const uint8_t* query, int, int d) { return bf16_to_float(get16(query + 2 * d)); }
};

template <int kBits>
struct Codes {
    static constexpr KvType kType = kBits == 8 ? KvType::q8 : KvType::q4;
    static int64_t code_bytes(int dim) { return int64_t{kBlock} * dim * kBits / 8; }
    // Positions count halves of bytes for q4.
    static int64_t key(int, int slot, int d) {
        if (kBits == 8) return (d / 4 * kBlock + slot) * 4 + d % 4;
        return 2 * ((d / 8 * kBlock + slot) * 4 + d % 4) + d % 8 / 4;
    }
    static int64_t value(int dim, int slot, int d) {
        if (kBits == 8) return code_bytes(dim) + (slot / 4 * dim + d) * 4 + slot % 4;
        return 2 * (code_bytes(dim) + slot / 4 * dim * 2 + d / 32 * 64 + d % 16 * 4 + slot % 4) + d % 32 / 16;
    }
    static int64_t scale(int dim, int slot, int which) {
        return 2 * code_bytes(dim) + 2 * (which * kBlock + slot);
    }
    static void write(uint8_t* block, int64_t at, int code) {
        if (kBits == 8)
            block[at] = static_cast<uint8_t>(code);
        else if (at % 2 == 0)
            block[at / 2] = static_cast<uint8_t>((block[at / 2] & 0xF0) | code);
        else
            block[at / 2] = static_cast<uint8_t>((block[at / 2] & 0x0F) | code << 4);
    }
    static float read(const uint8_t* block, int64_t at, int dim, int slot, int which) {
        const float step = bf16_to_float(get16(block + scale(dim, slot, which)));
        if (kBits == 8) return step * static_cast<float>(block[at] - 128);
        return step * static_cast<float>(2 * ((block[at / 2] >> at % 2 * 4) & 15) - 15);
    }
    static float query(const uint8_t* query, int dim, int d) {
        QueryScale scale;
        std::memcpy(&scale, query + dim, sizeof scale);
        return scale.scale * static_cast<float>(static_cast<int8_t>(query[d]));
    }
    // Codes of a head whose scale is rounded up to bf16; returns the scale.
    static uint16_t quantise(const float* x, int dim, int* codes) {
        float largest = 0;
        for (int d = 0; d < dim; ++d) largest = std::max(largest, std::abs(x[d]));
        const float wanted = largest * (kBits == 8 ? 1 / 127.0f : 1 / 16.0f);
        const auto narrow = static_cast<uint16_t>((std::bit_cast<uint32_t>(wanted) + 0xFFFF) >> 16);
        const float scale = bf16_to_float(narrow);
        const float inverse = scale > 1e-30f ? (kBits == 8 ? 1.0f : 0.5f) / scale : 0.0f;
        for (int d = 0; d < dim; ++d) {
            const float t = x[d] * inverse;
            codes[d] = kBits == 8 ? 128 + static_cast<int>(std::clamp(std::nearbyint(t), -127.0f, 127.0f))
                                  : 8 + static_cast<int>(std::clamp(std::nearbyint(t - 0.5f), -8.0f, 7.0f));
        }
        return narrow;
    }
};

// The weights of a step as the kernels use them, times `scale` of each value.
void round_weights(float* weights, const float* scale, int count) {
    float most = 0;
    for (int i = 0; i < count; ++i) most = std::max(most, weights[i] * scale[i]);
    const bool any = most > 1e-30f;
    for (int i = 0; i < count; ++i)
        weights[i] = any ? std::nearbyint(weights[i] * scale[i] * (16383.0f / most)) * (most / 16383.0f) : 0;
}

template <class Cache>
void split(const AttentionSplit& a) {
    const int dim = a.head_dim;
    for (int r = 0; r < a.rows; ++r) {
        float* out = a.out + r * dim;
        std::fill(out, out + dim, 0.0f);
        a.sum[r] = 0;
        a.max[r] = -std::numeric_limits<float>::infinity();
        const int64_t end = std::min(a.end, a.limit[r]);
        const auto block_of = [&](int64_t key) { return a.cache + a.table[key / kBlock] * a.block_stride; };
        const auto score = [&](int64_t key) {
            const int slot = static_cast<int>(key % kBlock);
            float dot = 0;
            for (int d = 0; d < dim; ++d)
                dot += Cache::query(a.query[r], dim, d) *
                       Cache::read(block_of(key), Cache::key(dim, slot, d), dim, slot, 0);
            return dot * a.scale;
        };
        for (int64_t key = a.begin; key < end; ++key) a.max[r] = std::max(a.max[r], score(key));
        for (int64_t first = a.begin; first < end; first += kAttentionStep) {
            const int count = static_cast<int>(std::min<int64_t>(kAttentionStep, end - first));
            float p[kAttentionStep], scale[kAttentionStep];
            for (int i = 0; i < count; ++i) {
                p[i] = std::exp2(score(first + i) - a.max[r]);
                a.sum[r] += p[i];
                if constexpr (Cache::kType == KvType::bf16)
                    p[i] = bf16_to_float(float_to_bf16(p[i]));
                else
                    scale[i] = bf16_to_float(get16(
                        block_of(first + i) + Cache::scale(dim, static_cast<int>((first + i) % kBlock), 1)));
            }
            if constexpr (Cache::kType != KvType::bf16) round_weights(p, scale, count);
            for (int i = 0; i < count; ++i) {
                const int slot = static_cast<int>((first + i) % kBlock);
                for (int d = 0; d < dim; ++d) {
                    float value = Cache::read(block_of(first + i), Cache::value(dim, slot, d), dim, slot, 1);
                    if constexpr (Cache::kType != KvType::bf16) value = scale[i] == 0 ? 0 : value / scale[i];
                    out[d] += p[i] * value;
                }
            }
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

void store(const float* key, const float* value, int head_dim, uint8_t* block, int slot) {
    for (int d = 0; d < head_dim; ++d) {
        put16(block + Bf16::key(head_dim, slot, d), float_to_bf16(key[d]));
        put16(block + Bf16::value(head_dim, slot, d), float_to_bf16(value[d]));
    }
}

template <int kBits>
void store_codes(const float* key, const float* value, int head_dim, uint8_t* block, int slot) {
    using Cache = Codes<kBits>;
    int codes[256];
    put16(block + Cache::scale(head_dim, slot, 0), Cache::quantise(key, head_dim, codes));
    for (int d = 0; d < head_dim; ++d) Cache::write(block, Cache::key(head_dim, slot, d), codes[d]);
    put16(block + Cache::scale(head_dim, slot, 1), Cache::quantise(value, head_dim, codes));
    for (int d = 0; d < head_dim; ++d) Cache::write(block, Cache::value(head_dim, slot, d), codes[d]);
}

void query(const float* query, int head_dim, uint8_t* out) {
    for (int d = 0; d < head_dim; ++d) put16(out + 2 * d, float_to_bf16(query[d]));
}

void query_codes(const float* query, int head_dim, uint8_t* out) {
    float largest = 0;
    for (int d = 0; d < head_dim; ++d) largest = std::max(largest, std::abs(query[d]));
    const float inverse = largest > 1e-30f ? 127.0f / largest : 0.0f;
    for (int d = 0; d < head_dim; ++d)
        out[d] = static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(query[d] * inverse)));
    const QueryScale scale{largest / 127.0f, 0};  // the sums here are of values, not of codes
    std::memcpy(out + head_dim, &scale, sizeof scale);
}

void rotate(float* x, int head_dim) {
    const int width = head_dim & -head_dim;
    for (int d = 0; d < head_dim; ++d) x[d] *= 1.0f / std::sqrt(static_cast<float>(width));
    for (int group = 0; group < head_dim; group += width)
        for (int distance = 1; distance < width; distance *= 2)
            for (int i = group; i < group + width; ++i)
                if (((i - group) & distance) == 0) {
                    const float u = x[i], v = x[i + distance];
                    x[i] = u + v;
                    x[i + distance] = u - v;
                }
}

}  // namespace

AttentionKernels attention_kernels(KvType type) {
    if (type == KvType::q8) return {split<Codes<8>>, merge, store_codes<8>, query_codes, rotate};
    if (type == KvType::q4) return {split<Codes<4>>, merge, store_codes<4>, query_codes, rotate};
    return {split<Bf16>, merge, store, query, nullptr};
}

}  // namespace treadle::ref
