// The q8 and q4 caches for any SIMD header. Included by attention_simd.h.

// Reads ahead, into L2, while the keys at `at` are read: the values of their block, and the next block's
// keys. Blocks lie anywhere, and are too short for the hardware to notice in time.
inline void fetch_ahead(const uint8_t* at, int64_t values, int64_t next) {
    __builtin_prefetch(at + values, 0, 2);
    __builtin_prefetch(at + values + 64, 0, 2);
    __builtin_prefetch(at + next, 0, 2);
    __builtin_prefetch(at + next + 64, 0, 2);
}

// What codes are off by in sums of products. The q8 codes of dot_codes are off by kCodeOffset, of q4 codes
// twice the sum is taken: 2 code - 15.
template <int kBits>
inline constexpr int32_t kStart = kBits == 8 ? -kCodeOffset : -15;

template <int kBits>
inline Int without_offset(Int sum, Int start) {
    return int_add(kBits == 8 ? sum : int_shift_left<1>(sum), start);
}

// Sum of the lanes, which must stay below 2^24.
inline int32_t exact_sum_of(Int a) { return static_cast<int32_t>(float_sum_of(to_float(a))); }

// Bytes of the codes of a block's keys, or values.
template <int kBits>
inline int64_t code_bytes(int head_dim) {
    return int64_t{kBlock} * head_dim * kBits / 8;
}

// scores[r][0..32) = query r . keys of one block, times scale
template <int kBits, int kRows>
void score_codes(const AttentionSplit& a, int first, const uint8_t* block, int64_t next, float* scores) {
    constexpr int kTogether = 32 / kBits;  // dimensions per 32-bit lane
    const Bytes nibble = bytes_splat(0x0F);
    Int acc[kRows][2];
    for (int r = 0; r < kRows; ++r) acc[r][0] = acc[r][1] = int_zero();
    for (int d = 0; d < a.head_dim; d += kTogether) {
        const uint8_t* at = block + d / kTogether * 4 * kBlock;
        if (first == 0) fetch_ahead(at, code_bytes<kBits>(a.head_dim), next);
        const Bytes low = bytes_load(at), high = bytes_load(at + 64);
        if constexpr (kBits == 8) {
            const Codes tokens[2] = {codes(low), codes(high)};
            for (int r = 0; r < kRows; ++r) {
                const int8_t* q = reinterpret_cast<const int8_t*>(a.query[first + r]) + d;
                acc[r][0] = dot_codes(acc[r][0], tokens[0], q);
                acc[r][1] = dot_codes(acc[r][1], tokens[1], q);
            }
        } else {
            const Bytes even[2] = {bytes_and(low, nibble), bytes_and(high, nibble)};
            const Bytes odd[2] = {bytes_and(bytes_shift_right<4>(low), nibble),
                                  bytes_and(bytes_shift_right<4>(high), nibble)};
            for (int r = 0; r < kRows; ++r) {
                const int8_t* q = reinterpret_cast<const int8_t*>(a.query[first + r]) + d;
                for (int v = 0; v < 2; ++v) {
                    acc[r][v] = dot_bytes<false>(acc[r][v], even[v], q);
                    acc[r][v] = dot_bytes<false>(acc[r][v], odd[v], q + 4);
                }
            }
        }
    }
    const uint8_t* scales = block + 2 * code_bytes<kBits>(a.head_dim);
    for (int r = 0; r < kRows; ++r) {
        QueryScale query;
        __builtin_memcpy(&query, a.query[first + r] + a.head_dim, sizeof query);
        const Float scale = float_splat(query.scale * a.scale);
        for (int v = 0; v < 2; ++v) {
            const Int sum = without_offset<kBits>(acc[r][v], int_splat(query.start));
            const Float by = float_mul(float_from_bf16(scales + 32 * v), scale);
            float_store(scores + r * kAttentionStep + 16 * v, float_mul(to_float(sum), by));
        }
    }
}

// One row's weights of a step in two parts of 7 bits: factor * (128 high + low).
struct CodeWeights {
    alignas(64) int8_t high[kAttentionStep], low[kAttentionStep];
    int32_t start_high, start_low;  // of the sums of products with codes
    float factor;

    // weights[i] * scale[i]
    template <int kBits>
    void set(const float* weights, const float* scale, int count) {
        alignas(64) float scaled[kAttentionStep];
        Float largest = float_zero();
        for (int i = 0; i < count; i += 16) {
            const Float w = float_mul(float_load(weights + i), float_load(scale + i));
            largest = float_max(largest, w);
            float_store(scaled + i, w);
        }
        const float most = float_max_of(largest);
        const bool any = most > 1e-30f;  // the inverse of less may be infinite
        const Float inverse = float_splat(any ? 16383.0f / most : 0.0f);
        factor = any ? most / 16383.0f : 0.0f;
        Int sum_high = int_zero(), sum_low = int_zero();
        for (int i = 0; i < count; i += 16) {
            const Int whole = to_int(float_mul(float_load(scaled + i), inverse));
            const Int upper = int_shift_right_signed<7>(whole), lower = int_and(whole, int_splat(127));
            sum_high = int_add(sum_high, upper);
            sum_low = int_add(sum_low, lower);
            store_i8(high + i, upper);
            store_i8(low + i, lower);
        }
        start_high = kStart<kBits> * exact_sum_of(sum_high);
        start_low = kStart<kBits> * exact_sum_of(sum_low);
    }
};

// out[r][d..d+32) += sum over the tokens of a step of weight[r][token] * value[token][d..]; kVectors = 1: 16
template <int kBits, int kRows, int kVectors>
void value_codes(const AttentionSplit& a, int d, int tokens, const uint8_t* const* values,
                 const CodeWeights* weights, float* out) {
    const Bytes nibble = bytes_splat(0x0F);
    Int high[kRows][kVectors], low[kRows][kVectors];
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) high[r][v] = low[r][v] = int_zero();
    for (int b = 0; b * kBlock < tokens; ++b) {
        const int end = tokens - b * kBlock < kBlock ? tokens - b * kBlock : kBlock;
        const uint8_t* at = values[b] + d * kBits / 2;
        for (int token = 0; token < end; token += 4, at += a.head_dim * kBits / 2) {
            const int index = b * kBlock + token;
            if constexpr (kBits == 8) {
                for (int v = 0; v < kVectors; ++v) {
                    const Codes value = codes(bytes_load(at + 64 * v));
                    for (int r = 0; r < kRows; ++r) {
                        high[r][v] = dot_weights(high[r][v], value, weights[r].high + index);
                        low[r][v] = dot_weights(low[r][v], value, weights[r].low + index);
                    }
                }
            } else {
                const Bytes both = bytes_load(at);
                const Bytes value[2] = {bytes_and(both, nibble),
                                        bytes_and(bytes_shift_right<4>(both), nibble)};
                for (int r = 0; r < kRows; ++r)
                    for (int v = 0; v < kVectors; ++v) {
                        high[r][v] = dot_bytes<false>(high[r][v], value[v], weights[r].high + index);
                        low[r][v] = dot_bytes<false>(low[r][v], value[v], weights[r].low + index);
                    }
            }
        }
    }
    for (int r = 0; r < kRows; ++r)
        for (int v = 0; v < kVectors; ++v) {
            float* to = out + r * a.head_dim + d + 16 * v;
            const Int upper = without_offset<kBits>(high[r][v], int_splat(weights[r].start_high));
            const Int lower = without_offset<kBits>(low[r][v], int_splat(weights[r].start_low));
            const Float sum = to_float(int_add(int_shift_left<7>(upper), lower));
            float_store(to, float_fma(sum, float_splat(weights[r].factor), float_load(to)));
        }
}

template <int kBits>
struct CodeCache {
    using Weights = CodeWeights;
    static constexpr int kValueRows = 3;  // x 2 vectors x 2 parts; with 6 rows GCC moves sums to the stack

    template <int kRows>
    static void score(const AttentionSplit& a, int first, const uint8_t* block, int64_t next, float* scores) {
        score_codes<kBits, kRows>(a, first, block, next, scores);
    }

    // Scales of the values of a step.
    struct Step {
        alignas(64) float scale[kAttentionStep];
        void add(int b, const AttentionSplit& a, const uint8_t* block, int tokens) {
            const uint8_t* from = block + 2 * code_bytes<kBits>(a.head_dim) + 2 * kBlock;
            for (int i = 0; i < kBlock; i += 16)
                float_store(scale + b * kBlock + i, float_from_bf16(from + 2 * i));
            // Behind the last token may be what another sequence left, even a NaN.
            for (int i = tokens < 0 ? 0 : tokens; i < kBlock; ++i) scale[b * kBlock + i] = 0.0f;
        }
    };
    static void weigh(CodeWeights& weights, const float* from, const Step& step, int count) {
        weights.set<kBits>(from, step.scale, count);
    }

    static const uint8_t* values(const uint8_t* block, int head_dim) {
        return block + code_bytes<kBits>(head_dim);
    }

    template <int kRows>
    static void add_values(const AttentionSplit& a, int tokens, const uint8_t* const* values,
                           const CodeWeights* weights, float* out) {
        int d = 0;
        for (; d + 32 <= a.head_dim; d += 32)
            value_codes<kBits, kRows, 2>(a, d, tokens, values, weights, out);
        if (kBits == 8 && d < a.head_dim) value_codes<8, kRows, 1>(a, d, tokens, values, weights, out);
    }
};

// Codes of a head, and the bf16 of their scale, which is rounded up so that no code is cut.
template <int kBits>
uint16_t quantise_head(const float* x, int head_dim, uint8_t* out) {
    Float largest = float_zero();
    for (int d = 0; d < head_dim; d += 16) largest = float_max(largest, float_abs(float_load(x + d)));
    const float wanted = float_max_of(largest) * (kBits == 8 ? 1 / 127.0f : 1 / 16.0f);
    uint32_t bits;
    __builtin_memcpy(&bits, &wanted, 4);
    bits = (bits + 0xFFFF) & 0xFFFF0000;
    float scale;
    __builtin_memcpy(&scale, &bits, 4);
    const float inverse = scale > 1e-30f ? (kBits == 8 ? 1.0f : 0.5f) / scale : 0.0f;
    alignas(64) float codes[16];
    for (int d = 0; d < head_dim; d += 16) {
        const Float t = float_mul(float_load(x + d), float_splat(inverse));
        const Float code = kBits == 8 ? float_round(t) : float_round(float_sub(t, float_splat(0.5f)));
        const float least = kBits == 8 ? -127.0f : -8.0f, most = kBits == 8 ? 127.0f : 7.0f;
        float_store(codes, float_min(float_max(code, float_splat(least)), float_splat(most)));
        for (int i = 0; i < 16; ++i)
            out[d + i] = static_cast<uint8_t>(static_cast<int>(codes[i]) + (kBits == 8 ? 128 : 8));
    }
    return static_cast<uint16_t>(bits >> 16);
}

template <int kBits>
void store_codes(const float* key, const float* value, int head_dim, uint8_t* block, int slot) {
    uint8_t codes[256];
    uint8_t* values = block + code_bytes<kBits>(head_dim);
    uint8_t* scales = values + code_bytes<kBits>(head_dim);
    const uint16_t key_scale = quantise_head<kBits>(key, head_dim, codes);
    if constexpr (kBits == 8) {
        for (int d = 0; d < head_dim; d += 4) __builtin_memcpy(block + d * kBlock + slot * 4, codes + d, 4);
    } else {
        for (int d = 0; d < head_dim; d += 8)
            for (int i = 0; i < 4; ++i)
                block[d / 2 * kBlock + slot * 4 + i] =
                    static_cast<uint8_t>(codes[d + i] | codes[d + 4 + i] << 4);
    }
    const uint16_t value_scale = quantise_head<kBits>(value, head_dim, codes);
    uint8_t* to = values + slot / 4 * head_dim * kBits / 2 + slot % 4;
    if constexpr (kBits == 8) {
        for (int d = 0; d < head_dim; ++d) to[d * 4] = codes[d];
    } else {
        for (int d = 0; d < head_dim; d += 32)
            for (int i = 0; i < 16; ++i)
                to[d * 2 + i * 4] = static_cast<uint8_t>(codes[d + i] | codes[d + 16 + i] << 4);
    }
    __builtin_memcpy(scales + 2 * slot, &key_scale, 2);
    __builtin_memcpy(scales + 2 * kBlock + 2 * slot, &value_scale, 2);
}

template <int kBits>
void query_codes(const float* query, int head_dim, uint8_t* out) {
    Float largest = float_zero();
    for (int d = 0; d < head_dim; d += 16) largest = float_max(largest, float_abs(float_load(query + d)));
    const float most = float_max_of(largest);
    const float inverse = most > 1e-30f ? 127.0f / most : 0.0f;
    Int sum = int_zero();
    for (int d = 0; d < head_dim; d += 16) {
        const Int code = to_int(float_mul(float_load(query + d), float_splat(inverse)));
        sum = int_add(sum, code);
        store_i8(reinterpret_cast<int8_t*>(out) + d, code);
    }
    const QueryScale scale{most / 127.0f, kStart<kBits> * exact_sum_of(sum)};
    __builtin_memcpy(out + head_dim, &scale, sizeof scale);
}

template <int kDistance>
inline Float butterfly(Float x) {
    alignas(64) static constexpr float kSigns[] = {
        kDistance & 0 ? -1.0f : 1.0f,  kDistance & 1 ? -1.0f : 1.0f,  kDistance & 2 ? -1.0f : 1.0f,
        kDistance & 3 ? -1.0f : 1.0f,  kDistance & 4 ? -1.0f : 1.0f,  kDistance & 5 ? -1.0f : 1.0f,
        kDistance & 6 ? -1.0f : 1.0f,  kDistance & 7 ? -1.0f : 1.0f,  kDistance & 8 ? -1.0f : 1.0f,
        kDistance & 9 ? -1.0f : 1.0f,  kDistance & 10 ? -1.0f : 1.0f, kDistance & 11 ? -1.0f : 1.0f,
        kDistance & 12 ? -1.0f : 1.0f, kDistance & 13 ? -1.0f : 1.0f, kDistance & 14 ? -1.0f : 1.0f,
        kDistance & 15 ? -1.0f : 1.0f};
    return float_fma(x, float_load(kSigns), float_swap<kDistance>(x));
}

// Walsh-Hadamard transform of groups of the largest power of two that divides head_dim, over its root.
void rotate_head(float* x, int head_dim) {
    const int width = head_dim & -head_dim;
    const Float scale = float_splat(1.0f / __builtin_sqrtf(static_cast<float>(width)));
    for (float* group = x; group < x + head_dim; group += width) {
        for (int i = 0; i < width; i += 16) {
            const Float v = butterfly<2>(butterfly<1>(float_mul(float_load(group + i), scale)));
            float_store(group + i, butterfly<8>(butterfly<4>(v)));
        }
        for (int distance = 16; distance < width; distance *= 2)
            for (int begin = 0; begin < width; begin += 2 * distance)
                for (int i = begin; i < begin + distance; i += 16) {
                    const Float u = float_load(group + i), v = float_load(group + i + distance);
                    float_store(group + i, float_add(u, v));
                    float_store(group + i + distance, float_sub(u, v));
                }
    }
}
