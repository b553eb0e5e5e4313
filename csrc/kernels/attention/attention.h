// Attention over a paged cache of keys and values, the kernels.
//
// The cache holds blocks of 32 tokens, per layer and kv head, in one of three types:
//
// bf16
//   keys    [head_dim / 2][32 tokens][2]    so that one vector holds a pair of dimensions of 16 tokens
//   values  [32 / 2 tokens][head_dim][2]    so that one vector holds a pair of tokens of 16 dimensions
//
// q8: a key or value is scale * (code - 128), one scale per token
//   keys    [head_dim / 4][32 tokens][4]    bytes: four dimensions of 16 tokens per vector
//   values  [32 / 4 tokens][head_dim][4]    bytes: four tokens of 16 dimensions per vector
//   scales  [2][32 tokens] in bf16, of the keys and of the values
//
// q4: scale * (2 code - 15), two codes per byte, the first in the low half
//   keys    [head_dim / 8][32 tokens][4]    byte b: dimensions b and b + 4 of eight
//   values  [32 / 4 tokens][head_dim / 32][16][4]   byte [d][t]: dimensions d and d + 16 of 32, token t of
//   four scales  as q8
//
// A byte belongs to one token, so that tokens of a block can be stored by several threads.
//
// Quantised heads are rotated by a Hadamard matrix first (arXiv 2404.00456): a few large dimensions, as keys
// have them, spread over all, so that one scale per token is enough. Queries are rotated alike, which leaves
// the products as they were, and results are rotated back. A query is int8 with a scale, products of keys are
// exact integers; softmax weights, times the scales of the values, are 14 bits with a scale per 128 keys.
//
// Softmax runs online (arXiv 2205.14135) over steps of 128 keys inside splits of 512 keys, both counted from
// the start of the sequence; splits are merged in order. A query's result therefore does not depend on how
// many queries are computed together, on the chunk of the prompt it came in, or on which thread had which
// split.
#pragma once

#include <cstdint>
#include <string_view>

#include "base/isa.h"

namespace treadle {

inline constexpr int kBlock = 32;           // tokens per cache block
inline constexpr int kAttentionStep = 128;  // keys per softmax step: scores of 8 rows stay in L1 (4 KiB)
inline constexpr int kSplit = 512;          // keys per split: 256 KiB of keys and values at 128 dimensions
inline constexpr int kMaxAttentionRows = 32;

enum class KvType { bf16, q8, q4 };

// Throws std::invalid_argument for a name that is none of bf16, q8, q4.
KvType kv_type_from_name(std::string_view name);

// Bytes of one block of one kv head. Throws std::invalid_argument, with a text for users, when the type has
// no layout for heads of this size.
int64_t head_block_bytes(KvType type, int head_dim);

// What the kernels read of a quantised query: head_dim codes, then this.
struct QueryScale {
    float scale;
    int32_t start;  // of the sum of products with codes: takes their offset away
};

// Bytes of a query: bf16, or codes and a QueryScale.
constexpr int64_t query_bytes(KvType type, int head_dim) {
    return type == KvType::bf16 ? 2 * head_dim : head_dim + 16;
}

// Some rows (query x head of one group) against the keys of one split.
struct AttentionSplit {
    const uint8_t* const* query;  // [rows], as AttentionKernels::query wrote them
    const int64_t* limit;         // [rows], how many keys from the start of the sequence the row may see
    int rows;                     // at most kMaxAttentionRows
    int head_dim;                 // a multiple of 16
    float scale;                  // log2(e) / sqrt(head_dim): scores are powers of two
    const uint8_t* cache;         // this layer's blocks for this kv head
    int64_t block_stride;         // bytes between blocks
    const int32_t* table;         // the sequence's block ids
    int64_t begin, end;           // keys; begin is a multiple of kSplit, end - begin at most kSplit
    float* max;                   // [rows] out: largest score, -inf if the row sees no key here
    float* sum;                   // [rows] out: sum of 2^(score - max)
    float* out;                   // [rows][head_dim] out: sum of 2^(score - max) * value
};

struct AttentionKernels {
    void (*split)(const AttentionSplit&);
    // Adds split `b` to `a`, which comes before it; the arrays are one row's.
    void (*merge)(float* max_a, float* sum_a, float* out_a, float max_b, float sum_b, const float* out_b,
                  int head_dim);
    // Puts one token's key and value into slot `slot` of a block.
    void (*store)(const float* key, const float* value, int head_dim, uint8_t* block, int slot);
    // Brings a query into the form that `split` reads, query_bytes long.
    void (*query)(const float* query, int head_dim, uint8_t* out);
    // Rotates a head in place; once more rotates it back. To be applied to queries, keys and values before
    // they are stored, and to results. Null: the type needs none.
    void (*rotate)(float* head, int head_dim);
};

AttentionKernels attention_kernels(Isa isa, KvType type);

}  // namespace treadle
