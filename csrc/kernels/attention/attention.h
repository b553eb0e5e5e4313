// Attention over a paged cache of keys and values, the kernels.
//
// The cache holds bf16 in blocks of 32 tokens, per layer and kv head:
//
//   keys    [head_dim / 2][32 tokens][2]    so that one vector holds a pair of dimensions of 16 tokens
//   values  [32 / 2 tokens][head_dim][2]    so that one vector holds a pair of tokens of 16 dimensions
//
// Softmax runs online (arXiv 2205.14135) over steps of 128 keys inside splits of 512 keys, both counted from
// the start of the sequence; splits are merged in order. A query's result therefore does not depend on how
// many queries are computed together, on the chunk of the prompt it came in, or on which thread had which
// split.
#pragma once

#include <cstdint>

#include "base/isa.h"

namespace treadle {

inline constexpr int kBlock = 32;           // tokens per cache block
inline constexpr int kAttentionStep = 128;  // keys per softmax step: scores of 8 rows stay in L1 (4 KiB)
inline constexpr int kSplit = 512;          // keys per split: 256 KiB of keys and values at 128 dimensions
inline constexpr int kMaxAttentionRows = 32;

// Some rows (query x head of one group) against the keys of one split.
struct AttentionSplit {
    const uint16_t* const* query;  // [rows], each head_dim values in bf16
    const int64_t* limit;          // [rows], how many keys from the start of the sequence the row may see
    int rows;                      // at most kMaxAttentionRows
    int head_dim;                  // a multiple of 16
    float scale;                   // log2(e) / sqrt(head_dim): scores are powers of two
    const uint16_t* cache;         // this layer's blocks for this kv head
    int64_t block_stride;          // values between blocks
    const int32_t* table;          // the sequence's block ids
    int64_t begin, end;            // keys; begin is a multiple of kSplit, end - begin at most kSplit
    float* max;                    // [rows] out: largest score, -inf if the row sees no key here
    float* sum;                    // [rows] out: sum of 2^(score - max)
    float* out;                    // [rows][head_dim] out: sum of 2^(score - max) * value
};

struct AttentionKernels {
    void (*split)(const AttentionSplit&);
    // Adds split `b` to `a`, which comes before it; the arrays are one row's.
    void (*merge)(float* max_a, float* sum_a, float* out_a, float max_b, float sum_b, const float* out_b,
                  int head_dim);
    // Puts one token's key and value into slot `slot` of a block.
    void (*store)(const float* key, const float* value, int head_dim, uint16_t* block, int slot);
};

AttentionKernels attention_kernels(Isa isa);

}  // namespace treadle
