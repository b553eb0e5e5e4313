// Attention for any SIMD header. Included by ISA-specific sources inside their namespace.

#include "kernels/simd/exp.h"
#include "kernels/attention/quantised_simd.h"

// Rows of scores computed together: 8 rows x 2 vectors fit 32 registers.
inline constexpr int kScoreRows = 8;

// scores[r][0..32) = query r . keys of one block, times scale; the next block is `next` bytes away
template <int kRows>
void score_pairs(const AttentionSplit& a, int first, const uint8_t* block, int64_t next, float* scores) {
    Float acc[kRows][2];
    for (int r = 0; r < kRows; ++r) acc[r][0] = acc[r][1] = float_zero();
    for (int pair = 0; pair < a.head_dim / 2; ++pair) {
        const uint8_t* at = block + pair * 4 * kBlock;
        if (first == 0) fetch_ahead(at, int64_t{2} * kBlock * a.head_dim, next);
        const Bytes low = bytes_load(at), high = bytes_load(at + 64);
        for (int r = 0; r < kRows; ++r) {
            uint32_t q;
            __builtin_memcpy(&q, a.query[first + r] + 4 * pair, 4);
            acc[r][0] = dot_bf16(acc[r][0], low, q);
            acc[r][1] = dot_bf16(acc[r][1], high, q);
        }
    }
    for (int r = 0; r < kRows; ++r) {
        float_store(scores + r * kAttentionStep, float_mul(acc[r][0], float_splat(a.scale)));
        float_store(scores + r * kAttentionStep + 16, float_mul(acc[r][1], float_splat(a.scale)));
    }
}

// One row's weights of a step.
struct PairWeights {
    alignas(64) uint16_t p[kAttentionStep];
};

// out[r][d..d+16*kVectors) += sum over the tokens of a step of p[token] * value[token][d..]
template <int kRows, int kVectors>
void value_pairs(const AttentionSplit& a, int d, int tokens, const uint8_t* const* values,
                 const PairWeights* weights, float* out) {
    Float acc[kRows][kVectors];
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) acc[r][v] = float_load(out + r * a.head_dim + d + v * 16);
    const auto add_pair = [&](int token, auto both) {
        const uint8_t* at = values[token / kBlock] + (token % kBlock / 2 * a.head_dim + d) * 4;
        Bytes value[kVectors];
        for (int v = 0; v < kVectors; ++v) {
            value[v] = bytes_load(at + v * 64);
            if constexpr (!both) value[v] = bytes_and(value[v], int_splat(0xFFFF));
        }
        for (int r = 0; r < kRows; ++r) {
            uint32_t pair;
            __builtin_memcpy(&pair, weights[r].p + token, 4);
            for (int v = 0; v < kVectors; ++v) acc[r][v] = dot_bf16(acc[r][v], value[v], pair);
        }
    };
    for (int token = 0; token + 2 <= tokens; token += 2) add_pair(token, std::true_type{});
    // Behind the last token may be what another sequence left, even an infinity, which times 0 is not 0.
    if (tokens % 2 != 0) add_pair(tokens - 1, std::false_type{});
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) float_store(out + r * a.head_dim + d + v * 16, acc[r][v]);
}

struct PairCache {
    using Weights = PairWeights;
    static constexpr int kValueRows = 6;  // x 4 vectors fit 32 registers
    struct Step {
        void add(int, const AttentionSplit&, const uint8_t*, int) {}
    };

    template <int kRows>
    static void score(const AttentionSplit& a, int first, const uint8_t* block, int64_t next, float* scores) {
        score_pairs<kRows>(a, first, block, next, scores);
    }
    static void weigh(PairWeights& weights, const float* from, const Step&, int count) {
        for (int i = 0; i < count; i += 16) store_bf16(weights.p + i, float_load(from + i));
    }
    static const uint8_t* values(const uint8_t* block, int head_dim) {
        return block + int64_t{2} * kBlock * head_dim;
    }
    template <int kRows>
    static void add_values(const AttentionSplit& a, int tokens, const uint8_t* const* values,
                           const PairWeights* weights, float* out) {
        int d = 0;
        for (; d + 64 <= a.head_dim; d += 64) value_pairs<kRows, 4>(a, d, tokens, values, weights, out);
        for (; d < a.head_dim; d += 16) value_pairs<kRows, 1>(a, d, tokens, values, weights, out);
    }
};

// Calls f with a compile-time count of rows from 1 to kMost.
template <int kMost, class F>
inline void with_rows(int rows, F f) {
    if constexpr (kMost > 1) {
        if (rows < kMost) return with_rows<kMost - 1>(rows, f);
    }
    f(std::integral_constant<int, kMost>{});
}

template <class Cache>
void attention_split(const AttentionSplit& a) {
    alignas(64) float scores[kMaxAttentionRows][kAttentionStep];
    typename Cache::Weights weights[kMaxAttentionRows];
    typename Cache::Step step;
    const float none = -__builtin_inff();
    for (int r = 0; r < a.rows; ++r) a.max[r] = none, a.sum[r] = 0;
    for (int64_t i = 0; i < static_cast<int64_t>(a.rows) * a.head_dim; i += 16)
        float_store(a.out + i, float_zero());

    for (int64_t key = a.begin; key < a.end; key += kAttentionStep) {
        const int tokens = static_cast<int>(a.end - key < kAttentionStep ? a.end - key : kAttentionStep);
        const int blocks = (tokens + kBlock - 1) / kBlock;
        const uint8_t* values[kAttentionStep / kBlock];
        for (int b = 0; b < blocks; ++b) {
            const uint8_t* block = a.cache + a.table[key / kBlock + b] * a.block_stride;
            const int64_t next =
                key + (b + 1) * kBlock < a.end
                    ? (a.table[key / kBlock + b + 1] - a.table[key / kBlock + b]) * a.block_stride
                    : 0;
            values[b] = Cache::values(block, a.head_dim);
            step.add(b, a, block, tokens - b * kBlock);
            for (int r = 0; r < a.rows; r += kScoreRows)
                with_rows<kScoreRows>(a.rows - r, [&](auto rows) {
                    Cache::template score<rows>(a, r, block, next, &scores[r][b * kBlock]);
                });
        }
        for (int r = 0; r < a.rows; ++r) {
            const int seen = static_cast<int>(a.limit[r] - key);  // keys of this step that the row may see
            for (int i = seen < 0 ? 0 : seen; i < blocks * kBlock; ++i) scores[r][i] = none;
            Float largest = float_splat(a.max[r]);
            for (int i = 0; i < blocks * kBlock; i += 16)
                largest = float_max(largest, float_load(&scores[r][i]));
            const float max = float_max_of(largest);
            const float base = max == none ? 0.0f : max;  // a row that sees nothing yet keeps a sum of zero
            Float sum = float_zero();
            for (int i = 0; i < blocks * kBlock; i += 16) {
                const Float e = float_exp2(float_sub(float_load(&scores[r][i]), float_splat(base)));
                sum = float_add(sum, e);
                float_store(&scores[r][i], e);
            }
            Cache::weigh(weights[r], scores[r], step, blocks * kBlock);
            const Float shrink = float_exp2(float_splat(a.max[r] - base));
            float first[16];
            float_store(first, shrink);
            a.sum[r] = a.sum[r] * first[0] + float_sum_of(sum);
            if (max != a.max[r]) {
                a.max[r] = max;
                float* out = a.out + r * a.head_dim;
                for (int d = 0; d < a.head_dim; d += 16)
                    float_store(out + d, float_mul(float_load(out + d), shrink));
            }
        }
        for (int r = 0; r < a.rows; r += Cache::kValueRows)
            with_rows<Cache::kValueRows>(a.rows - r, [&](auto rows) {
                Cache::template add_values<rows>(a, tokens, values, weights + r,
                                                 a.out + static_cast<int64_t>(r) * a.head_dim);
            });
    }
}

void attention_merge(float* max_a, float* sum_a, float* out_a, float max_b, float sum_b, const float* out_b,
                     int head_dim) {
    if (sum_b == 0.0f) return;
    const float max = *max_a > max_b ? *max_a : max_b;
    const Float shrink_a = float_exp2(float_splat(*max_a - max)),
                shrink_b = float_exp2(float_splat(max_b - max));
    float a[16], b[16];
    float_store(a, shrink_a);
    float_store(b, shrink_b);
    *sum_a = *sum_a * a[0] + sum_b * b[0];
    *max_a = max;
    for (int d = 0; d < head_dim; d += 16)
        float_store(out_a + d,
                    float_fma(float_load(out_b + d), shrink_b, float_mul(float_load(out_a + d), shrink_a)));
}

void store_pairs(const float* key, const float* value, int head_dim, uint8_t* block, int slot) {
    uint16_t narrow[16];
    uint8_t* values = block + int64_t{2} * kBlock * head_dim + slot / 2 * head_dim * 4 + slot % 2 * 2;
    for (int d = 0; d < head_dim; d += 16) {
        store_bf16(narrow, float_load(key + d));
        for (int i = 0; i < 16; i += 2)
            __builtin_memcpy(block + ((d + i) / 2 * kBlock + slot) * 4, narrow + i, 4);
        store_bf16(narrow, float_load(value + d));
        for (int i = 0; i < 16; ++i) __builtin_memcpy(values + (d + i) * 4, narrow + i, 2);
    }
}

void query_pairs(const float* query, int head_dim, uint8_t* out) {
    for (int d = 0; d < head_dim; d += 16)
        store_bf16(reinterpret_cast<uint16_t*>(out) + d, float_load(query + d));
}

AttentionKernels attention_kernels(KvType type) {
    if (type == KvType::q8)
        return {attention_split<CodeCache<8>>, attention_merge, store_codes<8>, query_codes<8>, rotate_head};
    if (type == KvType::q4)
        return {attention_split<CodeCache<4>>, attention_merge, store_codes<4>, query_codes<4>, rotate_head};
    return {attention_split<PairCache>, attention_merge, store_pairs, query_pairs, nullptr};
}
