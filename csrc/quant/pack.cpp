#include "quant/pack.h"

#include <immintrin.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/memory.h"
#include "quant/decode.h"
#include "threads/pool.h"

namespace treadle {

namespace {

// Eight steps of a group, in halves: outputs 0 to 7 and 8 to 15. A word holds four codes of one output.
using Steps = __m256i[8][2];

// step[s][half] = word s of eight rows of eight words, `stride` bytes apart.
void transpose(const uint8_t* rows, size_t stride, int half, Steps& step) {
    const auto pair = [&](int row, int word) {  // four words of row `row` and four of row + 4
        const uint8_t* at = rows + row * stride + word * 4;
        const __m128i low = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at));
        const __m128i high = _mm_loadu_si128(reinterpret_cast<const __m128i*>(at + 4 * stride));
        return _mm256_inserti128_si256(_mm256_castsi128_si256(low), high, 1);
    };
    for (int word = 0; word < 8; word += 4) {
        const __m256i a = pair(0, word), b = pair(1, word), c = pair(2, word), d = pair(3, word);
        const __m256i ab0 = _mm256_unpacklo_epi32(a, b), ab2 = _mm256_unpackhi_epi32(a, b);
        const __m256i cd0 = _mm256_unpacklo_epi32(c, d), cd2 = _mm256_unpackhi_epi32(c, d);
        step[word][half] = _mm256_unpacklo_epi64(ab0, cd0);
        step[word + 1][half] = _mm256_unpackhi_epi64(ab0, cd0);
        step[word + 2][half] = _mm256_unpacklo_epi64(ab2, cd2);
        step[word + 3][half] = _mm256_unpackhi_epi64(ab2, cd2);
    }
}

// The same for 16 rows.
void transpose_panel(const uint8_t* rows, size_t stride, Steps& step) {
    transpose(rows, stride, 0, step);
    transpose(rows + 8 * stride, stride, 1, step);
}

void store(uint8_t* out, int half, __m256i value) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + 32 * half), value);
}

// One bit plane of a group: kWidth bits from kShift up of every code. Returns where the next plane begins.
template <int kWidth, int kShift = 0>
uint8_t* pack_plane(const Steps& step, uint8_t* out) {
    constexpr int kPerByte = 8 / kWidth;
    const __m256i mask = _mm256_set1_epi8(static_cast<char>((1 << kWidth) - 1));
    for (int vector = 0; vector < kWidth; ++vector, out += 64) {
        for (int half = 0; half < 2; ++half) {
            __m256i bytes = _mm256_setzero_si256();
            for (int i = 0; i < kPerByte; ++i) {
                const __m256i code = step[vector * kPerByte + i][half];
                const __m256i bits = _mm256_and_si256(_mm256_srli_epi32(code, kShift), mask);
                bytes = _mm256_or_si256(bytes, _mm256_slli_epi32(bits, i * kWidth));
            }
            store(out, half, bytes);
        }
    }
    return out;
}

// The bit planes of a group of 32 k.
void pack_codes(int bits, const Steps& step, uint8_t* out) {
    switch (bits) {
    case 2: pack_plane<2>(step, out); return;
    case 3: pack_plane<1, 2>(step, pack_plane<2>(step, out)); return;
    case 4: pack_plane<4>(step, out); return;
    case 5: pack_plane<1, 4>(step, pack_plane<4>(step, out)); return;
    case 6: pack_plane<2, 4>(step, pack_plane<4>(step, out)); return;
    default: pack_plane<8>(step, out); return;
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
    Decoded lanes[kPanel];  // 5.5 KiB: with the packed superblock, half of L1
    if (rows < kPanel) std::memset(lanes, 0, sizeof lanes);
    for (int64_t begin = 0; begin < cols; begin += kSuper) {
        const int groups = static_cast<int>(std::min<int64_t>(kSuper, cols - begin) / kGroup);
        const uint8_t* blocks = data + file_bytes(format, begin);
        for (int lane = 0; lane < rows; ++lane) {
            decode(format, blocks + lane * row_bytes, groups, lanes[lane]);
            pack_header(format, lanes[lane], lane, out);
        }
        uint8_t* codes = out + header_bytes(format, groups);
        for (int g = 0; g < groups; ++g) {
            Steps step;
            transpose_panel(lanes[0].code + g * kGroup, sizeof(Decoded), step);
            pack_codes(bits, step, codes + g * group_bytes(format));
        }
        out += super_bytes(format, groups);
    }
}

// One float panel: pairs of k stay together for BF16, single values otherwise.
void pack_float_panel(Format format, const uint8_t* data, size_t row_bytes, int rows, uint8_t* out) {
    const size_t unit = format == Format::f16 ? 2 : 4;  // a BF16 pair, an F32 or an F16
    size_t done = 0;                                    // bytes of every row
    if (rows == kPanel) {
        const __m256i low = _mm256_set1_epi32(0xFFFF);
        for (; done + 32 <= row_bytes; done += 32) {
            Steps step;
            transpose_panel(data + done, row_bytes, step);
            for (int s = 0; s < 8; ++s, out += 64) {
                if (unit == 4) {
                    store(out, 0, step[s][0]);
                    store(out, 1, step[s][1]);
                    continue;
                }
                // packus works within 128-bit halves: outputs come as 0-3, 8-11, 4-7, 12-15.
                const auto narrow = [](__m256i a, __m256i b) {
                    return _mm256_permute4x64_epi64(_mm256_packus_epi32(a, b), 0b11011000);
                };
                store(out, 0, narrow(_mm256_and_si256(step[s][0], low), _mm256_and_si256(step[s][1], low)));
                store(out, 1, narrow(_mm256_srli_epi32(step[s][0], 16), _mm256_srli_epi32(step[s][1], 16)));
            }
        }
    }
    for (; done < row_bytes; done += unit, out += kPanel * unit)
        for (int lane = 0; lane < rows; ++lane)
            std::memcpy(out + lane * unit, data + lane * row_bytes + done, unit);
}

}  // namespace

Matrix pack(Pool& pool, Format format, const uint8_t* data, int64_t rows, int64_t cols, bool mapped) {
    const int multiple = format == Format::bf16 ? 2 : info(format).block_k;
    if (rows <= 0 || cols <= 0 || cols % multiple != 0)
        throw std::invalid_argument("a " + std::string(info(format).name) + " matrix of " +
                                    std::to_string(rows) + " x " + std::to_string(cols) +
                                    " values: columns must be a multiple of " + std::to_string(multiple));
    Matrix matrix{format, rows, cols, nullptr, nullptr};
    const auto memory = std::make_shared<Memory>(matrix.bytes());
    matrix.data = memory->data();
    matrix.owner = memory;
    const size_t row_bytes = file_bytes(format, cols);
    // Slices of the file: large enough for a system call each, and four per worker if they can be.
    constexpr size_t kSlice = size_t{2} << 20;
    const int64_t most = std::max<int64_t>(1, static_cast<int64_t>(kSlice / (kPanel * row_bytes)));
    const int64_t slice = std::clamp<int64_t>(matrix.panels() / (4 * pool.size()), 1, most);
    pool.parallel_for((matrix.panels() + slice - 1) / slice, [&](int64_t index) {
        const int64_t begin = index * slice, end = std::min(begin + slice, matrix.panels());
        const uint8_t* first = data + begin * kPanel * row_bytes;
        const size_t bytes = (std::min(end * kPanel, rows) - begin * kPanel) * row_bytes;
        if (mapped) fetch_pages(first, bytes);
        for (int64_t panel = begin; panel < end; ++panel) {
            const uint8_t* source = data + panel * kPanel * row_bytes;
            const int count = static_cast<int>(std::min<int64_t>(kPanel, rows - panel * kPanel));
            uint8_t* out = memory->data() + panel * matrix.stride();
            if (is_float(format))
                pack_float_panel(format, source, row_bytes, count, out);
            else
                pack_panel(format, source, row_bytes, count, cols, out);
        }
        if (mapped) release_pages(first, bytes);
    });
    return matrix;
}

Matrix copy(Pool& pool, const Matrix& matrix) {
    constexpr size_t kChunk = size_t{2} << 20;  // a huge page of the copy
    const size_t bytes = matrix.bytes();
    const auto memory = std::make_shared<Memory>(bytes);
    pool.parallel_for(static_cast<int64_t>((bytes + kChunk - 1) / kChunk), [&](int64_t index) {
        const size_t begin = index * kChunk;
        std::memcpy(memory->data() + begin, matrix.data + begin, std::min(kChunk, bytes - begin));
    });
    return {matrix.format, matrix.rows, matrix.cols, memory->data(), memory};
}

}  // namespace treadle
