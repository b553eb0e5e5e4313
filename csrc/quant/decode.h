// From file blocks to codes and scales, and to floats.
#pragma once

#include <cstdint>

#include "quant/format.h"

namespace treadle {

// One output row over one superblock (or the shorter last one), of any integer format.
struct Decoded {
    int groups;            // of 32 k
    uint8_t code[kSuper];  // value = scale * (code - offset) and so on, see FormatInfo
    // Formats without super-scales: per group of 32.
    uint16_t d[kGroupsPerSuper];
    uint16_t m[kGroupsPerSuper];
    // Formats with super-scales: scale = super_d * scale[i], minimum = super_min * min[i], per `scale_k`
    // values.
    uint16_t super_d;
    uint16_t super_min;
    int16_t scale[kSuper / 16];
    uint8_t min[kSuper / 16];
};

// Decodes `groups` groups of 32 (a whole number of file blocks) at `blocks`.
void decode(Format format, const uint8_t* blocks, int groups, Decoded& out);

// `k` values of one row at `blocks` as floats; equal bit for bit to the `gguf` package's dequantize.
void dequantise(Format format, const uint8_t* blocks, int64_t k, float* out);

}  // namespace treadle
