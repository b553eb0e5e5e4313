#include "quant/pack.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

#include "quant/bytes.h"
#include "quant/decode.h"
#include "threads/pool.h"

namespace treadle {

namespace {

// One bit plane of a group: `width` bits from `shift` up of every code, four codes (one step) at a time.
// Returns where the next plane begins.
template <int kWidth>
uint8_t* pack_plane(const uint8_t* code, int shift, uint8_t* lane) {
    constexpr int kPerByte = 8 / kWidth;
    constexpr uint32_t kMask = 0x01010101u * ((1u << kWidth) - 1);
    for (int vector = 0; vector < kWidth; ++vector, lane += 64) {
        uint32_t word = 0;
        for (int i = 0; i < kPerByte; ++i)
            word |= ((load32(code + 4 * (vector * kPerByte + i)) >> shift) & kMask) << (i * kWidth);
        std::memcpy(lane, &word, sizeof word);
    }
    return lane;
}

// Spreads the codes of one output row over the bit planes of a group of 32 k. `lane` points at the row's four
// bytes.
void pack_codes(int bits, const uint8_t* code, uint8_t* lane) {
    switch (bits) {
    case 2: pack_plane<2>(code, 0, lane); return;
    case 3: pack_plane<1>(code, 2, pack_plane<2>(code, 0, lane)); return;
    case 4: pack_plane<4>(code, 0, lane); return;
    case 5: pack_plane<1>(code, 4, pack_plane<4>(code, 0, lane)); return;
    case 6: pack_plane<2>(code, 4, pack_plane<4>(code, 0, lane)); return;
    default: pack_plane<8>(code, 0, lane); return;
    }
}

void pack_header(Format format, const Decoded& row, int lane, uint8_t* header) {
    const FormatInfo& f = info(format);
    const auto put16 = [&](size_t index, uint16_t value) { std::memcpy(header + 2 * index, &value, 2); };
    if (!f.super) {
        for (int g = 0; g < row.groups; ++g) {
            put16(g * kPanel + lane, row.d[g]);
            if (f.min) put16((row.groups + g) * kPanel + lane, row.m[g]);
        }
        return;
    }
    put16(lane, row.super_d);
    if (f.min) put16(kPanel + lane, row.super_min);
    uint8_t* scales = header + 2 * kPanel * (f.min ? 2 : 1);
    const int count = kSuper / f.scale_k;
    for (int i = 0; i < count; ++i) {
        uint8_t scale = static_cast<uint8_t>(row.scale[i]);
        if (format == Format::q2_k) scale |= row.min[i] << 4;
        scales[i * kPanel + lane] = scale;
    }
    if (f.min && f.scale_k == kGroup) {
        uint8_t* mins = scales + count * kPanel;
        for (int i = 0; i < count; ++i) mins[(i / 2 * kPanel + lane) * 2 + i % 2] = row.min[i];
    }
}

// One integer panel: `rows` rows of file data at `data`, each `row_bytes` long.
void pack_panel(Format format, const uint8_t* data, size_t row_bytes, int rows, int64_t cols, uint8_t* out) {
    const int bits = info(format).bits;
    Decoded row;
    for (int64_t begin = 0; begin < cols; begin += kSuper) {
        const int groups = static_cast<int>(std::min<int64_t>(kSuper, cols - begin) / kGroup);
        for (int lane = 0; lane < rows; ++lane) {
            decode(format, data + lane * row_bytes + file_bytes(format, begin), groups, row);
            pack_header(format, row, lane, out);
            uint8_t* codes = out + header_bytes(format, groups) + lane * 4;
            for (int g = 0; g < groups; ++g)
                pack_codes(bits, row.code + g * kGroup, codes + g * group_bytes(format));
        }
        out += super_bytes(format, groups);
    }
}

// One float panel: pairs of k stay together for BF16, single values otherwise.
void pack_float_panel(Format format, const uint8_t* data, size_t row_bytes, int rows, uint8_t* out) {
    const size_t unit = format == Format::f16 ? 2 : 4;  // a BF16 pair, an F32 or an F16
    const int64_t units = static_cast<int64_t>(row_bytes / unit);
    for (int lane = 0; lane < rows; ++lane)
        for (int64_t i = 0; i < units; ++i)
            std::memcpy(out + (i * kPanel + lane) * unit, data + lane * row_bytes + i * unit, unit);
}

}  // namespace

Matrix pack(Pool& pool, Format format, const uint8_t* data, int64_t rows, int64_t cols) {
    const int multiple = format == Format::bf16 ? 2 : info(format).block_k;
    if (rows <= 0 || cols <= 0 || cols % multiple != 0)
        throw std::invalid_argument("a " + std::string(info(format).name) + " matrix of " +
                                    std::to_string(rows) + " x " + std::to_string(cols) +
                                    " values: columns must be a multiple of " + std::to_string(multiple));
    Matrix matrix{format, rows, cols, {}};
    matrix.memory = Memory(matrix.panels() * matrix.stride());
    const size_t row_bytes = file_bytes(format, cols);
    pool.parallel_for(matrix.panels(), [&](int64_t index) {
        const uint8_t* first = data + index * kPanel * row_bytes;
        const int count = static_cast<int>(std::min<int64_t>(kPanel, rows - index * kPanel));
        uint8_t* out = matrix.memory.data() + index * matrix.stride();
        if (is_float(format))
            pack_float_panel(format, first, row_bytes, count, out);
        else
            pack_panel(format, first, row_bytes, count, cols, out);
    });
    return matrix;
}

}  // namespace treadle
