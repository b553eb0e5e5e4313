// The AMX kernels as the compiler made them, on any CPU with AVX512-BF16, against the scalar reference.
#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "base/amx.h"
#include "base/half.h"
#include "kernels/linear/linear.h"
#include "program/op.h"
#include "quant/pack.h"
#include "threads/pool.h"
#include "tile_trap.h"

namespace treadle::ref {
LinearKernels linear_kernels(Format format);
RowKernels row_kernels();
}  // namespace treadle::ref
namespace treadle::amx {
void add_blocks(Format format, LinearKernels& kernels);
}

namespace {

using namespace treadle;

std::mt19937 generator(1);

// Every bit pattern in codes and integer scales, 16-bit scales of sane size.
Matrix random_panel(Pool& pool, Format format, int64_t cols) {
    std::vector<uint8_t> data(file_bytes(format, cols) * kPanel);
    for (uint8_t& byte : data) byte = static_cast<uint8_t>(generator());
    Matrix matrix = pack(pool, format, data.data(), kPanel, cols);
    uint8_t* at = const_cast<uint8_t*>(matrix.data);  // of memory that pack has allocated
    const FormatInfo& f = info(format);
    const auto scales = [&](int count) {
        for (int i = 0; i < count * kPanel; ++i) {
            const uint16_t half = static_cast<uint16_t>(0x1400 + generator() % 0x800);
            std::memcpy(at + 2 * i, &half, 2);
        }
    };
    if (format == Format::bf16) {
        for (int64_t i = 0; i < cols * kPanel; ++i) {
            const uint16_t bits = float_to_bf16(std::normal_distribution<float>()(generator));
            std::memcpy(at + 2 * i, &bits, 2);
        }
        return matrix;
    }
    for (int64_t k = 0; k < cols; k += kSuper) {
        const int groups = static_cast<int>(std::min<int64_t>(kSuper, cols - k) / kGroup);
        scales((f.super ? 1 : groups) * (f.min ? 2 : 1));
        at += super_bytes(format, groups);
    }
    return matrix;
}

// Runs `rows` rows through the block kernel, in one range of k or in two, and through the reference.
bool same(const Matrix& matrix, int64_t rows, Form form) {
    const bool floats = form == Form::bf16;
    Buffer x(rows, matrix.cols, false);
    x.need(form);
    const RowKernels row_kernels = ref::row_kernels();
    for (int64_t row = 0; row < rows; ++row) {
        for (int64_t k = 0; k < matrix.cols; ++k)
            x.row(row)[k] = std::normal_distribution<float>()(generator);
        x.convert(form, row_kernels, row, 0, matrix.cols);
        for (int64_t k = 0; floats && k < matrix.cols; ++k) x.row(row)[k] = bf16_to_float(x.bf16_row(row)[k]);
    }
    LinearKernels kernels = ref::linear_kernels(matrix.format);
    amx::add_blocks(matrix.format, kernels);
    const LinearBlock& block = form == Form::two_bytes_32 ? kernels.two_byte_block : kernels.block;
    // One start for all rows for the one, in place for the other.
    const std::vector<float> start(kPanel, 0.5f);
    std::vector<float> expected(rows * kPanel), whole = expected, parts(rows * kPanel, 0.5f);
    LinearTile t{};
    t.panel = matrix.panel(0);
    t.k = matrix.cols;
    t.x_stride = x.stride();
    t.out_stride = kPanel;
    const auto set_row = [&](int64_t row, std::vector<float>& out) {
        t.start = start.data();
        t.start_stride = 0;
        t.x = x.row(row);
        t.x_bf16 = floats ? x.bf16_row(row) : nullptr;
        if (!floats) t.a = x.quantised(form, row);
        t.out = out.data() + row * kPanel;
    };
    for (int64_t row = 0; row < rows; ++row) {
        set_row(row, expected);
        t.k_begin = 0;
        t.k_end = t.k;
        kernels.tile[0](t);
    }
    t.rows = rows;
    block.configure(rows);
    set_row(0, whole);
    block.run(t);
    set_row(0, parts);
    t.start = t.out;
    t.start_stride = kPanel;
    const int64_t middle = std::min<int64_t>(kSuper, t.k);
    t.k_end = middle;
    block.run(t);
    t.k_begin = middle;
    t.k_end = t.k;
    if (t.k_end > middle) block.run(t);
    block.release();
    if (std::memcmp(whole.data(), parts.data(), whole.size() * sizeof(float)) != 0) return false;
    if (!floats) return std::memcmp(whole.data(), expected.data(), whole.size() * sizeof(float)) == 0;
    // float32 sums of k products of two normal values
    const float bound = 0x1p-24f * 8 * static_cast<float>(matrix.cols);
    for (size_t i = 0; i < whole.size(); ++i)
        if (!(std::abs(whole[i] - expected[i]) <= bound)) return false;
    return true;
}

int failures = 0;

void expect(bool condition, const std::string& what) {
    if (condition) return;
    std::printf("wrong: %s\n", what.c_str());
    ++failures;
}

void check_permission() {
    constexpr uint32_t kAll = 1u << 22 | 1u << 24 | 1u << 25;
    constexpr uint64_t kSaved = uint64_t{3} << 17;
    expect(amx_lack(kAll, kSaved, 0).empty(), "AMX with everything is there");
    for (int bit : {22, 24, 25})
        expect(amx_lack(kAll & ~(1u << bit), kSaved, 0) == "it lacks AMX-TILE, AMX-INT8 or AMX-BF16",
               "a missing extension is told");
    for (int bit : {17, 18})
        expect(amx_lack(kAll, kSaved & ~(uint64_t{1} << bit), 0) ==
                   "the operating system does not save its AMX registers",
               "registers that are not saved are told");
    expect(amx_lack(kAll, kSaved, 1) == "the kernel gives this process no permission for its AMX registers: "
                                        "Operation not permitted",
           "a refusal is told");
    expect(amx_lack(kAll, kSaved, ENOSPC) ==
               "a thread's alternate signal stack is too small for AMX registers",
           "a small signal stack is told");
}

}  // namespace

int main() {
    check_permission();
    if (!amx_lack().empty()) trap_tile_instructions();
    Pool pool({0});
    for (int i = 0; i < kFormats; ++i) {
        const Format format = static_cast<Format>(i);
        const FormatInfo& f = info(format);
        if (is_float(format) && format != Format::bf16) continue;
        std::vector<Form> forms{format == Format::bf16 ? Form::bf16
                                : f.super              ? Form::int8_256
                                                       : Form::int8_32};
        if (!is_float(format) && !f.super) forms.push_back(Form::two_bytes_32);
        const std::vector<int64_t> sizes = format == Format::bf16 ? std::vector<int64_t>{2, 70, 608}
                                           : f.super              ? std::vector<int64_t>{256, 1280}
                                                                  : std::vector<int64_t>{32, 288, 1184};
        for (Form form : forms)
            for (int64_t cols : sizes) {
                const Matrix matrix = random_panel(pool, format, cols);
                for (int64_t rows : {1, 2, 7, 16, 17, 33, 83})
                    expect(same(matrix, rows, form), std::string(f.name) + ", " + std::to_string(rows) +
                                                         " rows of " + std::to_string(cols));
            }
    }
    if (failures == 0) std::printf("all right\n");
    return failures == 0 ? 0 : 1;
}
