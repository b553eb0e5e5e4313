#include "sampling/row.h"

#include <immintrin.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>

namespace treadle {

namespace {

// Vectors of 8 floats through the compilers' vector extension: one AVX register, which every target CPU has.
constexpr int64_t kLanes = 8;
using Floats = float __attribute__((vector_size(kLanes * sizeof(float))));
using Words = uint32_t __attribute__((vector_size(kLanes * sizeof(uint32_t))));

Floats load(const float* p) {
    Floats v;
    std::memcpy(&v, p, sizeof v);
    return v;
}

void store(float* p, Floats v) { std::memcpy(p, &v, sizeof v); }

Floats all(float x) { return Floats{} + x; }

// The compiler may not fuse on its own; the vector extension has no name for it.
Floats fma(Floats a, Floats b, Floats c) {
    return std::bit_cast<Floats>(
        _mm256_fmadd_ps(std::bit_cast<__m256>(a), std::bit_cast<__m256>(b), std::bit_cast<__m256>(c)));
}

// The order of the operands makes a NaN in x lose.
Floats max_of(Floats x, Floats best) { return x > best ? x : best; }

float max_lane(Floats v) {
    float best = v[0];
    for (int lane = 1; lane < kLanes; ++lane) best = v[lane] > best ? v[lane] : best;
    return best;
}

float sum_lanes(Floats v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

// exp(x) for x <= 0 with a relative error below 2e-7; 0 for NaN and for x <= kLeastExponent.
// x = n ln 2 + r, |r| <= ln 2 / 2; exp(r) by its Taylor polynomial of degree 7 (remainder r^8 / 8! < 6e-9).
Floats exp_negative(Floats x) {
    constexpr float kRound = 0x1.8p23f;       // adding it leaves round(x / ln 2) in the low mantissa bits
    constexpr float kLn2High = 0x1.62e4p-1f;  // 15 bits, so that n * kLn2High is exact
    constexpr float kLn2Low = 0x1.7f7d1cp-20f;
    const Floats shifted = fma(x, all(0x1.715476p0f), all(kRound));
    const Floats n = shifted - kRound;
    const Floats r = fma(n, all(-kLn2Low), fma(n, all(-kLn2High), x));
    Floats p = all(1.0f / 5040);
    for (const float coefficient : {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f})
        p = fma(p, r, all(coefficient));
    const Words bits = std::bit_cast<Words>(p) + (std::bit_cast<Words>(shifted) << 23);
    return x > kLeastExponent ? std::bit_cast<Floats>(bits) : all(0);
}

Floats weight(Floats x, float max, float scale) {
    const Floats largest = all(FLT_MAX);
    const Floats finite = largest < x ? largest : x;  // a NaN stays one
    return exp_negative((finite - max) * scale);
}

void block_weights(const float* x, float max, float scale, float (&weights)[kRowBlock]) {
    for (int64_t i = 0; i < kRowBlock; i += kLanes) store(weights + i, weight(load(x + i), max, scale));
}

// The block's logits; the row's last, partial block comes padded with -inf in `padded`.
const float* block_at(const float* row, int64_t size, int64_t block, float (&padded)[kRowBlock]) {
    const int64_t begin = block * kRowBlock;
    if (begin + kRowBlock <= size) return row + begin;
    std::fill(std::copy(row + begin, row + size, padded), padded + kRowBlock, -INFINITY);
    return padded;
}

int64_t block_count(int64_t size) { return (size + kRowBlock - 1) / kRowBlock; }

}  // namespace

int32_t row_argmax(const float* row, int64_t size) {
    // Four maxima hide the latency of compare and blend behind loads from L2. The id comes from a second look
    // at the one stretch that held the maximum: 4 KB, so that the look is short and may hit L1.
    constexpr int64_t kStretch = 1024;
    float best = -INFINITY;
    int64_t begin = -1;
    int64_t i = 0;
    for (; i + kStretch <= size; i += kStretch) {
        Floats m0 = all(-INFINITY), m1 = m0, m2 = m0, m3 = m0;
        for (const float* p = row + i; p < row + i + kStretch; p += 4 * kLanes) {
            m0 = max_of(load(p), m0);
            m1 = max_of(load(p + kLanes), m1);
            m2 = max_of(load(p + 2 * kLanes), m2);
            m3 = max_of(load(p + 3 * kLanes), m3);
        }
        const float stretch = max_lane(max_of(max_of(m0, m1), max_of(m2, m3)));
        if (stretch > best) {
            best = stretch;
            begin = i;
        }
    }
    for (; i < size; ++i) {
        if (row[i] > best) {
            best = row[i];
            begin = i;
        }
    }
    if (begin < 0) return -1;
    return static_cast<int32_t>(std::find(row + begin, row + size, best) - row);
}

float row_block_maxima(const float* row, int64_t size, std::vector<float>& maxima) {
    const int64_t blocks = block_count(size);
    maxima.resize(blocks);
    float padded[kRowBlock];
    float largest = -INFINITY;
    for (int64_t block = 0; block < blocks; ++block) {
        const float* x = block_at(row, size, block, padded);
        Floats m0 = all(-INFINITY), m1 = m0;
        for (int64_t i = 0; i < kRowBlock; i += 2 * kLanes) {
            m0 = max_of(load(x + i), m0);
            m1 = max_of(load(x + i + kLanes), m1);
        }
        maxima[block] = std::min(max_lane(max_of(m0, m1)), FLT_MAX);
        largest = std::max(largest, maxima[block]);
    }
    return largest;
}

double row_block_weights(const float* row, int64_t size, const std::vector<float>& maxima, float max,
                         float scale, std::vector<float>& sums) {
    const int64_t blocks = block_count(size);
    sums.assign(blocks, 0.0f);
    float padded[kRowBlock];
    double total = 0;
    for (int64_t block = 0; block < blocks; ++block) {
        if (!((maxima[block] - max) * scale > kLeastExponent)) continue;  // all its weights are 0
        const float* x = block_at(row, size, block, padded);
        Floats s0 = all(0), s1 = s0;
        for (int64_t i = 0; i < kRowBlock; i += 2 * kLanes) {
            s0 += weight(load(x + i), max, scale);
            s1 += weight(load(x + i + kLanes), max, scale);
        }
        sums[block] = sum_lanes(s0 + s1);
        total += sums[block];
    }
    return total;
}

int32_t row_find_weight(const float* row, int64_t size, const std::vector<float>& sums, float max,
                        float scale, double target) {
    int64_t found = 0;
    double before = 0;
    double before_found = 0;
    for (int64_t block = 0; block < std::ssize(sums) && before <= target; ++block) {
        if (sums[block] == 0) continue;
        found = block;
        before_found = before;
        before += sums[block];
    }
    float padded[kRowBlock];
    float weights[kRowBlock];
    block_weights(block_at(row, size, found, padded), max, scale, weights);
    // Summed in another order than the block was, so the last id with a weight ends the walk in any case.
    int64_t last = 0;
    for (int64_t i = 0; i < kRowBlock && before_found <= target; ++i) {
        if (weights[i] == 0) continue;
        last = i;
        before_found += weights[i];
    }
    return static_cast<int32_t>(found * kRowBlock + last);
}

void row_gather(const float* row, int64_t size, const std::vector<float>& maxima, float threshold, float max,
                float scale, std::vector<Candidate>& out) {
    threshold = std::max(threshold, -FLT_MAX);
    float padded[kRowBlock];
    float weights[kRowBlock];
    size_t count = 0;
    for (int64_t block = 0; block < std::ssize(maxima); ++block) {
        if (maxima[block] < threshold) continue;
        const float* x = block_at(row, size, block, padded);
        block_weights(x, max, scale, weights);
        if (out.size() < count + kRowBlock) out.resize(2 * count + kRowBlock);
        // Without a branch: on flat rows it would be mispredicted all the time.
        for (int64_t i = 0; i < kRowBlock; ++i) {
            out[count] = {x[i] > FLT_MAX ? FLT_MAX : x[i], weights[i],
                          static_cast<int32_t>(block * kRowBlock + i)};
            count += x[i] >= threshold;
        }
    }
    out.resize(count);
}

void row_copy_masked(const float* row, int64_t size, const uint32_t* mask, float* target) {
    constexpr Words kBit = {1, 2, 4, 8, 16, 32, 64, 128};
    int64_t i = 0;
    for (; i + kLanes <= size; i += kLanes) {
        const uint32_t byte = mask[i / 32] >> (i % 32);  // its low 8 bits belong to these 8 lanes
        const Words selected = (Words{} + byte) & kBit;
        store(target + i, selected != 0 ? load(row + i) : all(-INFINITY));
    }
    for (; i < size; ++i) target[i] = (mask[i / 32] >> (i % 32) & 1) ? row[i] : -INFINITY;
}

}  // namespace treadle
