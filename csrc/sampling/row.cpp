#include "sampling/row.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <iterator>

namespace treadle {

namespace {

// Vectors of 8 floats through the compilers' vector extension: one AVX register here, whatever the target has elsewhere.
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

// The order of the operands makes a NaN in x lose, as the first operand of x86's maxps does.
Floats max_of(Floats x, Floats best) { return x > best ? x : best; }

float max_lane(Floats v) {
    float best = v[0];
    for (int lane = 1; lane < kLanes; ++lane) best = v[lane] > best ? v[lane] : best;
    return best;
}

float sum_lanes(Floats v) { return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7])); }

// exp(x) for x <= 0 with a relative error below 2e-7; 0 for NaN and below -87, where results turn denormal.
// x = n ln 2 + r, |r| <= ln 2 / 2; exp(r) by its Taylor polynomial of degree 7 (remainder r^8 / 8! < 6e-9).
Floats exp_negative(Floats x) {
    constexpr float kRound = 0x1.8p23f;      // adding it leaves round(x / ln 2) in the low mantissa bits
    constexpr float kLn2High = 0x1.62e4p-1f;  // 15 bits, so that n * kLn2High is exact
    constexpr float kLn2Low = 0x1.7f7d1cp-20f;
    const Floats shifted = x * 0x1.715476p0f + kRound;
    const Floats n = shifted - kRound;
    const Floats r = (x - n * kLn2High) - n * kLn2Low;
    Floats p = all(1.0f / 5040);
    p = p * r + 1.0f / 720;
    p = p * r + 1.0f / 120;
    p = p * r + 1.0f / 24;
    p = p * r + 1.0f / 6;
    p = p * r + 0.5f;
    p = p * r + 1.0f;
    p = p * r + 1.0f;
    const Words bits = std::bit_cast<Words>(p) + (std::bit_cast<Words>(shifted) << 23);
    return x > -87.0f ? std::bit_cast<Floats>(bits) : all(0);
}

Floats weight(Floats x, float max, float scale) {
    const Floats finite = x > FLT_MAX ? all(FLT_MAX) : x;
    return exp_negative((finite - max) * scale);
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
    // Four maxima hide the latency of maxps (4 cycles, 2 per cycle would want 8 but loads from L2 are slower); the
    // ids come from a second look at the one stretch that held the maximum, which is still in L1 (4 KB).
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

double row_block_weights(const float* row, int64_t size, const std::vector<float>& maxima, float max, float scale,
                         std::vector<float>& sums) {
    const int64_t blocks = block_count(size);
    sums.assign(blocks, 0.0f);
    float padded[kRowBlock];
    double total = 0;
    for (int64_t block = 0; block < blocks; ++block) {
        if (!((maxima[block] - max) * scale > -87.0f)) continue;  // all its weights are 0
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

int32_t row_find_weight(const float* row, int64_t size, const std::vector<float>& sums, float max, float scale,
                        double target) {
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
    const float* x = block_at(row, size, found, padded);
    for (int64_t i = 0; i < kRowBlock; i += kLanes) store(weights + i, weight(load(x + i), max, scale));
    // Summed in another order than the block was, so the last id with a weight ends the walk in any case.
    int64_t last = 0;
    for (int64_t i = 0; i < kRowBlock && before_found <= target; ++i) {
        if (weights[i] == 0) continue;
        last = i;
        before_found += weights[i];
    }
    return static_cast<int32_t>(found * kRowBlock + last);
}

void row_gather(const float* row, int64_t size, const std::vector<float>& maxima, float threshold,
                std::vector<Candidate>& out) {
    threshold = std::max(threshold, -FLT_MAX);
    for (int64_t block = 0; block < std::ssize(maxima); ++block) {
        if (maxima[block] < threshold) continue;
        const int64_t end = std::min((block + 1) * kRowBlock, size);
        for (int64_t i = block * kRowBlock; i < end; ++i)
            if (row[i] >= threshold) out.push_back({std::min(row[i], FLT_MAX), 0.0f, static_cast<int32_t>(i)});
    }
}

void set_weights(std::vector<Candidate>& candidates, float max, float scale) {
    for (size_t begin = 0; begin < candidates.size(); begin += kLanes) {
        const size_t count = std::min<size_t>(kLanes, candidates.size() - begin);
        Floats x = all(-INFINITY);
        for (size_t lane = 0; lane < count; ++lane) x[lane] = candidates[begin + lane].value;
        const Floats w = weight(x, max, scale);
        for (size_t lane = 0; lane < count; ++lane) candidates[begin + lane].weight = w[lane];
    }
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
