// The weight formats of GGUF files, and the packed layouts that the kernels read.
//
// File formats: the GGUF specification and the block structures that the `gguf` package decodes.
//
// A packed matrix is a row of panels. A panel holds 16 output rows of the matrix over all of K, so that one
// 512-bit vector has one 32-bit lane per output, and is one sequential stream of bytes:
//
//   float formats     F32: [K][16]   F16: [K][16]   BF16: [K/2][16][2]
//   integer formats   superblocks of up to 256 k, each a header (scales) and then its groups of 32 k
//
// The codes of a group of 32 k are split into bit planes, lowest bits first; step s of 8 covers k = 4s..4s+3,
// lane n is an output, b = 0..3 is k within the step:
//
//   8 bits  512 bytes  [s][n][b]                  the code
//   4 bits  256 bytes  [s/2][n][b]                step s in the low half byte if s is even, else the high one
//   2 bits  128 bytes  [s/4][n][b]                step s in bits 2(s%4) and up
//   1 bit    64 bytes  [n][b]                     step s in bit s
//
// Headers, for a superblock of g groups of 32 (g < 8 only in the last one, only in formats without
// super-scales):
//
//   Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 IQ4_NL   d: f16 [g][16], then for Q4_1 and Q5_1 m: f16 [g][16]
//   Q4_K Q5_K                         d: f16 [16], dmin: f16 [16], scales: u8 [8][16], mins: u8 [4][16][2]
//   Q2_K                              d: f16 [16], dmin: f16 [16], scale | min << 4: u8 [16][16]
//   Q3_K Q6_K                         d: f16 [16], scales: i8 [16][16]
//   IQ4_XS                            d: f16 [16], scales: i8 [8][16]
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

namespace treadle {

// In the order of kFormatInfo.
// clang-format off
enum class Format { f32, f16, bf16, q4_0, q4_1, q5_0, q5_1, q8_0, q2_k, q3_k, q4_k, q5_k, q6_k, iq4_nl, iq4_xs };
// clang-format on

inline constexpr int kFormats = 15;
inline constexpr int kPanel = 16;   // output rows per panel: 32-bit lanes of a 512-bit vector
inline constexpr int kSuper = 256;  // k per superblock
inline constexpr int kGroup = 32;   // k per code group
inline constexpr int kGroupsPerSuper = kSuper / kGroup;

// Functions here are always inlined: an out-of-line copy compiled for a higher ISA could otherwise be the one
// that the linker keeps for everybody.
struct FormatInfo {
    std::string_view name;  // as in GGUF
    int block_k;            // values per block in the file
    int block_bytes;        // bytes per block in the file
    int bits;               // per code; 0 for float formats
    int scale_k;            // values that share one scale
    int offset;      // value = scale * (code - offset); codebook formats: code -> kCodebook[code] + 128
    bool super;      // integer scales under one f16 scale per 256
    bool min;        // value = scale * code +- min
    bool codebook;   // 4-bit non-linear codes
    int header_pad;  // bytes that align the codes to 64, where that costs less than 4 % of the file
};

inline constexpr FormatInfo kFormatInfo[kFormats] = {
    {"F32", 1, 4, 0, 1, 0, false, false, false, 0},
    {"F16", 1, 2, 0, 1, 0, false, false, false, 0},
    {"BF16", 1, 2, 0, 1, 0, false, false, false, 0},
    {"Q4_0", 32, 18, 4, 32, 8, false, false, false, 0},
    {"Q4_1", 32, 20, 4, 32, 0, false, true, false, 0},
    {"Q5_0", 32, 22, 5, 32, 16, false, false, false, 0},
    {"Q5_1", 32, 24, 5, 32, 0, false, true, false, 0},
    {"Q8_0", 32, 34, 8, 32, 128, false, false, false, 0},
    {"Q2_K", 256, 84, 2, 16, 0, true, true, false, 0},
    {"Q3_K", 256, 110, 3, 16, 4, true, false, false, 0},
    {"Q4_K", 256, 144, 4, 32, 0, true, true, false, 0},
    {"Q5_K", 256, 176, 5, 32, 0, true, true, false, 0},
    {"Q6_K", 256, 210, 6, 16, 32, true, false, false, 32},
    {"IQ4_NL", 32, 18, 4, 32, 128, false, false, true, 0},
    {"IQ4_XS", 256, 136, 4, 32, 128, true, false, true, 32},
};

// Values of the 4-bit codes of IQ4_NL and IQ4_XS.
inline constexpr int8_t kCodebook[16] = {-127, -104, -83, -65, -49, -35, -22, -10,
                                         1,    13,   25,  38,  53,  69,  89,  113};

[[gnu::always_inline]] constexpr const FormatInfo& info(Format format) {
    return kFormatInfo[static_cast<int>(format)];
}
[[gnu::always_inline]] constexpr bool is_float(Format format) { return info(format).bits == 0; }

// The format named as in GGUF ("Q4_K"), if the kernels know it.
std::optional<Format> format_from_name(std::string_view name);

// Bytes of `k` values in the file; k must be a multiple of block_k.
[[gnu::always_inline]] constexpr size_t file_bytes(Format format, size_t k) {
    return k / info(format).block_k * info(format).block_bytes;
}

// Bytes of a superblock's header with `groups` groups of 32.
[[gnu::always_inline]] constexpr size_t header_bytes(Format format, int groups) {
    const FormatInfo& f = info(format);
    if (!f.super) return static_cast<size_t>(groups) * 2 * kPanel * (f.min ? 2 : 1);
    const size_t scales = kSuper / f.scale_k * kPanel;
    const size_t mins =
        f.min && f.scale_k == 32 ? kGroupsPerSuper * kPanel : 0;  // Q2_K keeps them beside the scales
    return 2 * kPanel * (f.min ? 2 : 1) + scales + mins + f.header_pad;
}

// Bytes of one group's codes: 32 k of 16 outputs.
[[gnu::always_inline]] constexpr size_t group_bytes(Format format) {
    return static_cast<size_t>(info(format).bits) * kGroup * kPanel / 8;
}

[[gnu::always_inline]] constexpr size_t super_bytes(Format format, int groups) {
    return header_bytes(format, groups) + groups * group_bytes(format);
}

// Bytes of a panel: 16 output rows over `k` values.
[[gnu::always_inline]] constexpr size_t panel_bytes(Format format, size_t k) {
    if (is_float(format)) return k * kPanel * info(format).block_bytes;
    const size_t full = k / kSuper;
    const int rest = static_cast<int>(k % kSuper / kGroup);
    return full * super_bytes(format, kGroupsPerSuper) + (rest ? super_bytes(format, rest) : 0);
}

}  // namespace treadle
