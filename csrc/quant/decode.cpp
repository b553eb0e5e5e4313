#include "quant/decode.h"

#include <algorithm>
#include <cstring>

#include "base/half.h"
#include "quant/bytes.h"

namespace treadle {

namespace {

// Half bytes as the 32-value formats store them: value i in the low half of byte i, value 16 + i in the high
// half.
void halves(const uint8_t* q, uint8_t* __restrict code) {
    for (int i = 0; i < 16; ++i) {
        code[i] = q[i] & 0xF;
        code[16 + i] = q[i] >> 4;
    }
}

// d, [m,] [qh,] then half bytes (4 and 5 bits) or signed bytes (8 bits).
void decode_simple(Format format, const uint8_t* p, int groups, Decoded& out) {
    const FormatInfo& f = info(format);
    for (int g = 0; g < groups; ++g, p += f.block_bytes) {
        const uint8_t* q = p + 2;
        uint8_t* __restrict code = out.code + g * kGroup;
        out.d[g] = load16(p);
        out.m[g] = 0;
        if (f.min) {
            out.m[g] = load16(q);
            q += 2;
        }
        if (f.bits == 8) {
            for (int i = 0; i < kGroup; ++i) code[i] = q[i] ^ 0x80;  // i8 + 128
            continue;
        }
        if (f.bits == 4) {
            halves(q, code);
            continue;
        }
        const uint32_t high = load32(q);
        halves(q + 4, code);
        for (int i = 0; i < kGroup; ++i) code[i] |= ((high >> i) & 1) << 4;
    }
}

// 8 scales and 8 minimums of 6 bits in 12 bytes: the low bits of the last four of each are in bytes 8 to 11,
// their high bits on top of bytes 0 to 7.
void scales_mins_6bit(const uint8_t* p, int16_t* scale, uint8_t* min) {
    for (int i = 0; i < 4; ++i) {
        scale[i] = p[i] & 0x3F;
        min[i] = p[4 + i] & 0x3F;
        scale[4 + i] = (p[8 + i] & 0xF) | ((p[i] >> 2) & 0x30);
        min[4 + i] = (p[8 + i] >> 4) | ((p[4 + i] >> 2) & 0x30);
    }
}

void decode_q4_k_q5_k(bool five, const uint8_t* p, Decoded& out) {
    out.super_d = load16(p);
    out.super_min = load16(p + 2);
    scales_mins_6bit(p + 4, out.scale, out.min);
    const uint8_t* high = p + 16;
    const uint8_t* q = five ? p + 48 : p + 16;
    for (int pair = 0; pair < 4; ++pair) {
        uint8_t* __restrict code = out.code + pair * 64;
        for (int i = 0; i < 32; ++i) {
            code[i] = q[pair * 32 + i] & 0xF;
            code[32 + i] = q[pair * 32 + i] >> 4;
        }
        if (!five) continue;
        for (int i = 0; i < 32; ++i) {
            code[i] |= ((high[i] >> (2 * pair)) & 1) << 4;
            code[32 + i] |= ((high[i] >> (2 * pair + 1)) & 1) << 4;
        }
    }
}

// 64 bytes for 256 codes of 2 bits: 32 bytes hold four groups of 32, the first in their lowest bits.
void two_bits(const uint8_t* q, uint8_t* __restrict code) {
    for (int g = 0; g < kGroupsPerSuper; ++g)
        for (int i = 0; i < kGroup; ++i) code[g * kGroup + i] = (q[g / 4 * kGroup + i] >> (g % 4 * 2)) & 3;
}

void decode_q2_k(const uint8_t* p, Decoded& out) {
    for (int i = 0; i < 16; ++i) {
        out.scale[i] = p[i] & 0xF;
        out.min[i] = p[i] >> 4;
    }
    two_bits(p + 16, out.code);
    out.super_d = load16(p + 80);
    out.super_min = load16(p + 82);
}

void decode_q3_k(const uint8_t* p, Decoded& out) {
    const uint8_t* high = p;
    const uint8_t* s = p + 96;
    two_bits(p + 32, out.code);
    for (int g = 0; g < kGroupsPerSuper; ++g)
        for (int i = 0; i < kGroup; ++i) out.code[g * kGroup + i] |= ((high[i] >> g) & 1) << 2;
    for (int i = 0; i < 16; ++i) {
        const int low = (s[i % 8] >> (i / 8 * 4)) & 0xF;
        out.scale[i] = (low | ((s[8 + i % 4] >> (i / 4 * 2)) & 3) << 4) - 32;
    }
    out.super_d = load16(p + 108);
}

void decode_q6_k(const uint8_t* p, Decoded& out) {
    for (int half = 0; half < 2; ++half) {
        const uint8_t *low = p + half * 64, *high = p + 128 + half * 32;
        uint8_t* __restrict code = out.code + half * 128;
        for (int i = 0; i < 32; ++i) {
            code[i] = (low[i] & 0xF) | (high[i] & 3) << 4;
            code[32 + i] = (low[32 + i] & 0xF) | ((high[i] >> 2) & 3) << 4;
            code[64 + i] = (low[i] >> 4) | ((high[i] >> 4) & 3) << 4;
            code[96 + i] = (low[32 + i] >> 4) | (high[i] >> 6) << 4;
        }
    }
    for (int i = 0; i < 16; ++i) out.scale[i] = static_cast<int8_t>(p[192 + i]);
    out.super_d = load16(p + 208);
}

void decode_iq4_xs(const uint8_t* p, Decoded& out) {
    out.super_d = load16(p);
    const uint16_t high = load16(p + 2);
    for (int i = 0; i < 8; ++i) {
        const int low = (p[4 + i / 2] >> (i % 2 * 4)) & 0xF;
        out.scale[i] = (low | ((high >> (2 * i)) & 3) << 4) - 32;
        halves(p + 8 + i * 16, out.code + i * 32);
    }
}

// The value of one code before scaling.
float level(const FormatInfo& f, uint8_t code) {
    return static_cast<float>(f.codebook ? kCodebook[code] : code - f.offset);
}

}  // namespace

std::optional<Format> format_from_name(std::string_view name) {
    for (int i = 0; i < kFormats; ++i)
        if (kFormatInfo[i].name == name) return static_cast<Format>(i);
    return std::nullopt;
}

void decode(Format format, const uint8_t* blocks, int groups, Decoded& out) {
    out.groups = groups;
    switch (format) {
    case Format::q4_k: return decode_q4_k_q5_k(false, blocks, out);
    case Format::q5_k: return decode_q4_k_q5_k(true, blocks, out);
    case Format::q2_k: return decode_q2_k(blocks, out);
    case Format::q3_k: return decode_q3_k(blocks, out);
    case Format::q6_k: return decode_q6_k(blocks, out);
    case Format::iq4_xs: return decode_iq4_xs(blocks, out);
    default: return decode_simple(format, blocks, groups, out);
    }
}

void dequantise(Format format, const uint8_t* blocks, int64_t k, float* out) {
    const FormatInfo& f = info(format);
    if (format == Format::f32) {
        std::memcpy(out, blocks, k * sizeof(float));
        return;
    }
    if (is_float(format)) {
        for (int64_t i = 0; i < k; ++i) {
            const uint16_t bits = load16(blocks + 2 * i);
            out[i] = format == Format::f16 ? half_to_float(bits) : bf16_to_float(bits);
        }
        return;
    }
    Decoded row;
    for (int64_t begin = 0; begin < k; begin += kSuper) {
        const int groups = static_cast<int>(std::min<int64_t>(kSuper, k - begin) / kGroup);
        decode(format, blocks + file_bytes(format, begin), groups, row);
        for (int i = 0; i < groups * kGroup; ++i) {
            const float q = level(f, row.code[i]);
            if (!f.super) {
                const float scaled = half_to_float(row.d[i / kGroup]) * q;
                out[begin + i] = f.min ? scaled + half_to_float(row.m[i / kGroup]) : scaled;
                continue;
            }
            const float scaled =
                half_to_float(row.super_d) * static_cast<float>(row.scale[i / f.scale_k]) * q;
            out[begin + i] =
                f.min ? scaled - half_to_float(row.super_min) * static_cast<float>(row.min[i / f.scale_k])
                      : scaled;
        }
    }
}

}  // namespace treadle
