// Activations as integers: the right-hand side of every integer linear kernel.
#pragma once

#include <cstddef>
#include <cstdint>

namespace treadle {

// The sums of the activations are kept times the largest offset of the weights that use them (Q6_K; Q8_0 and
// the codebooks), so that a kernel starts there without a shift and the other formats shift.
inline constexpr int32_t kOffset16 = 32, kOffset32 = 128;

// Rows of a float matrix quantised per group of 32 or 256 values, to nearest, symmetric in [-127, 127]:
//
//   q[m][k] = round(x[m][k] / scale[m][k / scale_k]),   scale = max |x| / 127 over the group
//
// or, for models that are too small to hide 8-bit rounding, to 15 bits in [-16256, 16256] as two signed
// bytes:
//
//   high[m][k] * 128 + low[m][k] = round(x[m][k] / scale),   scale = max |x| / 16256
//
// with the sums that offsets and minimums of the weights multiply. All pointers are to row 0.
struct Quantised {
    int scale_k;           // 32 or 256: weights without super-scales and with them
    const int8_t* q;       // [rows][q_stride]: the 8 bits, or the high byte
    const int8_t* low;     // [rows][q_stride], null with 8 bits
    const float* scale;    // [rows][groups32], of which the first k / scale_k are used
    const float* sum;      // [rows][groups32], scale * sum of q over 32; only when scale_k is 32
    const int32_t* neg32;  // [rows][groups32], - kOffset32 * sum of q over 32
    const int32_t* neg16;  // [rows][2 * groups32], - kOffset16 * sum of q over 16
    const int16_t* words;  // [rows][groups32], sum of q over 32, as 16-bit pairs; only with 8 bits
    int64_t q_stride;      // bytes between rows
    int64_t groups32;      // groups of 32 per row, rounded up to 8

    Quantised from_row(int64_t row) const {
        const int64_t group = row * groups32;
        return {scale_k,
                q + row * q_stride,
                low ? low + row * q_stride : nullptr,
                scale + group,
                sum ? sum + group : nullptr,
                neg32 + group,
                neg16 + 2 * group,
                words ? words + group : nullptr,
                q_stride,
                groups32};
    }
};

}  // namespace treadle
