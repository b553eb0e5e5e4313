// The readable reference: one output and one row at a time, straight from the packed layout of
// quant/format.h, in the order of operations that every kernel keeps.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <utility>

#include "base/half.h"
#include "kernels/linear/linear.h"

namespace treadle::ref {

namespace {

float half_at(const uint8_t* p, size_t index) {
    uint16_t bits;
    std::memcpy(&bits, p + 2 * index, 2);
    return half_to_float(bits);
}

// The code of output `lane` at `k` of 32 from a group's bit planes.
int code_at(int bits, const uint8_t* group, int lane, int k) {
    const int step = k / 4, byte = lane * 4 + k % 4;
    const auto plane = [&](const uint8_t* p, int width) {
        const int per_byte = 8 / width;
        return (p[step / per_byte * 64 + byte] >> (step % per_byte * width)) & ((1 << width) - 1);
    };
    switch (bits) {
    case 2: return plane(group, 2);
    case 3: return plane(group, 2) | plane(group + 128, 1) << 2;
    case 4: return plane(group, 4);
    case 5: return plane(group, 4) | plane(group + 256, 1) << 4;
    case 6: return plane(group, 4) | plane(group + 256, 2) << 4;
    default: return plane(group, 8);
    }
}

template <Format kFormat>
float int_output(const LinearTile& t, int lane, float out) {
    constexpr const FormatInfo& f = info(kFormat);
    const Quantised& a = t.a;
    const uint8_t* w = t.panel + t.k_begin / kSuper * super_bytes(kFormat, kGroupsPerSuper);
    for (int64_t k = t.k_begin; k < t.k_end; k += kSuper) {
        const int groups = static_cast<int>(std::min<int64_t>(kSuper, t.k - k) / kGroup);
        const uint8_t* codes = w + header_bytes(kFormat, groups);
        const uint8_t* scales = w + 2 * kPanel * (f.min ? 2 : 1);
        float sum = f.super ? 0.0f : out;
        for (int i = 0; i < groups * kGroup / f.scale_k; ++i) {
            int dot = 0;
            for (int j = i * f.scale_k; j < (i + 1) * f.scale_k; ++j) {
                const int code = code_at(f.bits, codes + j / kGroup * group_bytes(kFormat), lane, j % kGroup);
                const int q = a.low != nullptr ? a.q[k + j] * 128 + a.low[k + j] : a.q[k + j];
                dot += (f.codebook ? kCodebook[code] : code - f.offset) * q;
            }
            if (f.super) {
                const uint8_t byte = scales[i * kPanel + lane];
                const int scale = kFormat == Format::q2_k ? byte & 0xF
                                  : f.min                 ? byte
                                                          : static_cast<int8_t>(byte);
                sum = std::fma(static_cast<float>(dot), static_cast<float>(scale), sum);
            } else {
                const int64_t group = k / kGroup + i;
                sum = std::fma(static_cast<float>(dot), half_at(w, i * kPanel + lane) * a.scale[group], sum);
                if (f.min) sum = std::fma(half_at(w, (groups + i) * kPanel + lane), a.sum[group], sum);
            }
        }
        if (f.super) {
            const float scale = a.scale[k / kSuper];
            out = std::fma(sum, half_at(w, lane) * scale, out);
            if (f.min) {
                int mins = 0;
                for (int i = 0; i < kSuper / f.scale_k; ++i) {
                    if (kFormat == Format::q2_k)
                        mins += (scales[i * kPanel + lane] >> 4) * (-a.neg16[k / 16 + i] / kOffset16);
                    else
                        mins += scales[kGroupsPerSuper * kPanel + (i / 2 * kPanel + lane) * 2 + i % 2] *
                                a.words[k / kGroup + i];
                }
                out = std::fma(static_cast<float>(-mins), half_at(w, kPanel + lane) * scale, out);
            }
        } else {
            out = sum;
        }
        w += super_bytes(kFormat, groups);
    }
    return out;
}

template <Format kFormat>
float float_output(const LinearTile& t, int lane, float out) {
    for (int64_t k = t.k_begin; k < t.k_end; ++k) {
        float w;
        if constexpr (kFormat == Format::f32) {
            std::memcpy(&w, t.panel + (k * kPanel + lane) * 4, 4);
        } else if constexpr (kFormat == Format::f16) {
            w = half_at(t.panel, k * kPanel + lane);
        } else {
            uint16_t bits;
            std::memcpy(&bits, t.panel + ((k / 2 * kPanel + lane) * 2 + k % 2) * 2, 2);
            w = bf16_to_float(bits);
        }
        out = std::fma(w, t.x[k], out);
    }
    return out;
}

template <Format kFormat>
void tile(const LinearTile& t) {
    for (int lane = 0; lane < kPanel; ++lane) {
        if constexpr (is_float(kFormat))
            t.out[lane] = float_output<kFormat>(t, lane, t.start[lane]);
        else
            t.out[lane] = int_output<kFormat>(t, lane, t.start[lane]);
    }
}

template <int... kFormat>
LinearKernel find(Format format, std::integer_sequence<int, kFormat...>) {
    LinearKernel found = nullptr;
    ((static_cast<int>(format) == kFormat ? void(found = tile<static_cast<Format>(kFormat)>) : void()), ...);
    return found;
}

}  // namespace

LinearKernels linear_kernels(Format format) {
    LinearKernels kernels;
    kernels.max_rows = 1;
    kernels.tile[0] = find(format, std::make_integer_sequence<int, kFormats>{});
    if (!is_float(format) && !info(format).super) {
        kernels.max_two_byte_rows = 1;
        kernels.two_byte_tile[0] = kernels.tile[0];
    }
    return kernels;
}

}  // namespace treadle::ref
