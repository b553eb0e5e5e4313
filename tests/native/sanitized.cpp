// Every kernel and operation at odd shapes, for a build with AddressSanitizer and UndefinedBehaviorSanitizer.
//
//   sanitized LEVEL...
//
// Runs the levels (ref, avx2, ...) that this CPU has; for amx any with AVX512-BF16 will do. All memory is on
// the heap in blocks of exactly the sizes that the contracts name, so that a read or write past an end is
// seen; what is computed is checked by the other tests.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/amx.h"
#include "kernels/attention/attention.h"
#include "kernels/rows/rows.h"
#include "program/program.h"
#include "quant/decode.h"
#include "tile_trap.h"

namespace {

using namespace treadle;

std::mt19937 generator(1);

// Its capacity is its size, so the sanitizer sees its end.
std::vector<float> floats(size_t count) {
    std::vector<float> out(count);
    for (float& x : out) x = std::normal_distribution<float>()(generator);
    return out;
}

// Of weights. Without the two highest bits every float, of 16 bits or 32, is finite and of moderate size.
std::vector<uint8_t> bytes(size_t count) {
    std::vector<uint8_t> out(count);
    for (uint8_t& x : out) x = static_cast<uint8_t>(generator() & 0x3F);
    return out;
}

void run_rows(Isa isa) {
    const RowKernels kernels = row_kernels(isa);
    for (size_t n : {1, 2, 15, 16, 17, 30, 32, 66, 100}) {
        const std::vector<float> x = floats(n), y = floats(n);
        std::vector<float> out(n);
        std::vector<uint16_t> narrow(n);
        const int64_t count = static_cast<int64_t>(n);
        kernels.rms_norm(x.data(), y.data(), count, 1e-5f, out.data());
        kernels.swiglu(x.data(), y.data(), count, out.data());
        kernels.to_bf16(x.data(), count, narrow.data());
        if (n % 2 != 0) continue;
        const std::vector<float> cos = floats(n / 2), sin = floats(n / 2);
        kernels.rope(out.data(), count, cos.data(), sin.data(), true);
        kernels.rope(out.data(), count, cos.data(), sin.data(), false);
    }
    for (size_t n : {32, 96, 256, 288}) {
        for (size_t scale_k : {32, 256}) {
            for (bool two_bytes : {false, true}) {
                const std::vector<float> x = floats(n);
                std::vector<int8_t> q(n), low(n);
                std::vector<float> scale((n + scale_k - 1) / scale_k), sum(n / 32);
                std::vector<int32_t> neg32(n / 32), neg16(n / 16);
                std::vector<int16_t> words(n / 32);
                kernels.quantise(x.data(), static_cast<int64_t>(n), static_cast<int>(scale_k),
                                 {q.data(), two_bytes ? low.data() : nullptr, scale.data(),
                                  scale_k == 32 ? sum.data() : nullptr, neg32.data(), neg16.data(),
                                  words.data()});
            }
        }
    }
}

void run_attention(Isa isa, KvType type) {
    const AttentionKernels kernels = attention_kernels(isa, type);
    for (int dim : {16, 48, 80, 96, 256}) {
        if (type == KvType::q4 && dim % 32 != 0) continue;
        for (int tokens : {1, 33, 130, 512}) {
            for (int rows : {1, 5, 13, 32}) {
                const size_t blocks = (tokens + kBlock - 1) / kBlock;
                const int64_t stride = head_block_bytes(type, dim);
                std::vector<uint8_t> cache(blocks * stride);
                std::vector<int32_t> table(blocks);
                for (size_t b = 0; b < blocks; ++b) table[b] = static_cast<int32_t>(b);
                std::vector<float> key = floats(dim), value = floats(dim);
                if (kernels.rotate) kernels.rotate(key.data(), dim);
                for (int t = 0; t < tokens; ++t)
                    kernels.store(key.data(), value.data(), dim, cache.data() + t / kBlock * stride,
                                  t % kBlock);
                std::vector<std::vector<uint8_t>> queries(rows);
                std::vector<const uint8_t*> query;
                for (std::vector<uint8_t>& q : queries) {
                    q.resize(query_bytes(type, dim));
                    kernels.query(key.data(), dim, q.data());
                    query.push_back(q.data());
                }
                const std::vector<int64_t> limit(rows, (tokens + 1) / 2);
                std::vector<float> max(rows), sum(rows), out(static_cast<size_t>(rows) * dim);
                kernels.split({query.data(), limit.data(), rows, dim, 0.1f, cache.data(), stride,
                               table.data(), 0, tokens, max.data(), sum.data(), out.data()});
                const std::vector<float> first(out.begin(), out.begin() + dim);
                kernels.merge(&max[0], &sum[0], out.data(), max[0], sum[0], first.data(), dim);
            }
        }
    }
}

std::shared_ptr<const Matrix> random_matrix(Pool& pool, Format format, int64_t rows, int64_t cols) {
    const std::vector<uint8_t> data = bytes(file_bytes(format, cols) * rows);
    return std::make_shared<Matrix>(pack(pool, format, data.data(), rows, cols));
}

Step one_sequence(int64_t past, int64_t length, const std::vector<int32_t>& table) {
    Step step;
    step.tokens.assign(length, 0);
    for (int64_t i = 0; i < length; ++i) step.tokens[i] = static_cast<int32_t>(i % 3);
    step.row_sequence.assign(length, 0);
    step.sequences.push_back({0, length, past, table.data()});
    step.logits_rows = {static_cast<int32_t>(length - 1)};
    return step;
}

const auto never = [] { return false; };

void run_linear(const std::shared_ptr<Pool>& pool, Isa isa, Format format, int64_t cols, bool two_bytes) {
    const std::shared_ptr<const Matrix> matrix = random_matrix(*pool, format, 17, cols);
    // Trapped instructions are slow.
    const std::vector<int64_t> counts =
        isa == Isa::amx ? std::vector<int64_t>{1, 9, 35} : std::vector<int64_t>{1, 2, 7, 14, 45};
    for (int64_t rows : counts) {
        Program program(pool, isa, {rows, 1, 1}, two_bytes);
        const int x = program.buffer(cols, false), y = program.buffer(17, false),
                  z = program.buffer(17, false);
        program.linear(x, {matrix}, floats(17), -1, y);
        program.gated_linear(x, matrix, matrix, z);
        for (int64_t row = 0; row < rows; ++row) {
            const std::vector<float> values = floats(cols);
            std::memcpy(program.at(x).row(row), values.data(), cols * sizeof(float));
        }
        program.run(one_sequence(0, rows, {0, 0}), never);
    }
}

// A layer, with everything that operations have: fused parts, bias, residual, head norms, a gate.
void run_program(const std::shared_ptr<Pool>& pool, Isa isa, Format format, int heads, int kv_heads,
                 bool two_bytes) {
    constexpr int kDim = 48, kMost = 70, kBlocks = 21;
    const int64_t width = static_cast<int64_t>(heads) * kDim, cols = 256;
    Program program(pool, isa, {kMost, 2, kBlocks}, two_bytes);
    const int x = program.buffer(cols, false), normed = program.buffer(cols, false);
    const int qkv = program.buffer(width + 2 * kv_heads * kDim, false),
              attended = program.buffer(width, false);
    const int gated = program.buffer(cols, false), wanted = program.buffer(cols, true),
              logits = program.buffer(33, true);
    const std::vector<uint8_t> table = bytes(file_bytes(format, cols) * 3);
    program.embed(format, table, 3, x);
    program.rms_norm(x, floats(cols), 1e-5f, normed);
    const int64_t kv = static_cast<int64_t>(kv_heads) * kDim;
    program.linear(normed,
                   {random_matrix(*pool, format, width, cols), random_matrix(*pool, format, kv, cols),
                    random_matrix(*pool, Format::f16, kv, cols)},
                   floats(width + 2 * kv), -1, qkv);
    program.angles(floats(kDim / 2), 1.0f);
    program.attention(qkv, {heads, kv_heads, kDim}, heads % 2 == 0, {floats(kDim), floats(kDim), 1e-5f},
                      attended);
    program.linear(attended, {random_matrix(*pool, Format::bf16, cols, width)}, {}, x, x);
    program.gated_linear(x, random_matrix(*pool, format, cols, cols),
                         random_matrix(*pool, format, cols, cols), gated);
    program.select(gated, wanted);
    program.linear(wanted, {random_matrix(*pool, format, 33, cols)}, {}, -1, logits);
    std::vector<int32_t> blocks(kBlocks);
    for (int i = 0; i < kBlocks; ++i) blocks[i] = kBlocks - 1 - i;
    int64_t past = 0;
    for (int64_t length : {1, 33, 70, 7, 70, 70, 70, 70, 70, 70, 1, 40, 1}) {
        program.run(one_sequence(past, length, blocks), never);
        past += length;
    }
    program.run(one_sequence(0, 5, blocks), [] { return true; });
    blocks[0] = kBlocks;
    try {
        program.run(one_sequence(0, 5, blocks), never);
    } catch (const std::invalid_argument&) {
        return;
    }
    throw std::logic_error("a block outside the cache was accepted");
}

void run_level(const std::shared_ptr<Pool>& pool, Isa isa) {
    const bool tiles = isa == Isa::amx;  // the rest is that of bf16
    if (!tiles) {
        run_rows(isa);
        for (KvType type : {KvType::bf16, KvType::q8, KvType::q4}) run_attention(isa, type);
    }
    for (int i = 0; i < kFormats; ++i) {
        const Format format = static_cast<Format>(i);
        const bool super = info(format).super;
        if (tiles && !linear_kernels(isa, format).block.run) continue;
        for (int64_t cols : {super ? 256 : is_float(format) ? 34 : 32, super ? 512 : 288, 1280})
            for (bool two_bytes : {false, true})
                if (!tiles || !super || !two_bytes) run_linear(pool, isa, format, cols, two_bytes);
    }
    run_program(pool, isa, Format::q4_k, 2, 1, false);
    if (tiles) return;
    run_program(pool, isa, Format::q8_0, 7, 1, true);
    run_program(pool, isa, Format::f32, 4, 4, false);
    run_program(pool, isa, Format::q2_k, 32, 1, true);
}

}  // namespace

int main(int argc, char** argv) {
    // On any CPUs: a worker that cannot be pinned works all the same.
    const auto pool = std::make_shared<Pool>(std::vector<int>{0, 1, 2});
    for (int i = 1; i < argc; ++i) {
        const bool amx = argv[i] == isa_name(Isa::amx);
        if (amx && !amx_lack().empty()) trap_tile_instructions();
        run_level(pool, amx ? Isa::amx : isa_from_name(argv[i]));
        std::printf("%s\n", argv[i]);
    }
    return 0;
}
