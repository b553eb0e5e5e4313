#include <algorithm>
#include <cstring>
#include <vector>

#include "base/memory.h"
#include "quant/pack.h"
#include "threads/pool.h"

namespace treadle {

namespace {

constexpr size_t kChunk = size_t{4} << 20;  // mapped at once: 1024 pages, well above a system call
constexpr int kLanes = 32;  // four vectors of 32-bit words hide the latency of a multiplication

// Multiplication by an odd number and exclusive or can both be undone, so a lane keeps every difference.
uint32_t step(uint32_t sum, uint32_t word) { return (sum ^ word) * 0x9E3779B1u; }

uint64_t sum_chunk(const uint8_t* data, size_t bytes) {
    uint32_t lanes[kLanes] = {};
    size_t done = 0;
    for (; done + sizeof lanes <= bytes; done += sizeof lanes) {
        uint32_t words[kLanes];
        std::memcpy(words, data + done, sizeof words);
        for (int i = 0; i < kLanes; ++i) lanes[i] = step(lanes[i], words[i]);
    }
    uint32_t rest[kLanes] = {};
    std::memcpy(rest, data + done, bytes - done);
    for (int i = 0; i < kLanes; ++i) lanes[i] = step(lanes[i], rest[i]);
    uint64_t sum = bytes;
    for (uint32_t lane : lanes) sum = (sum ^ lane) * 0x9E3779B97F4A7C15u, sum ^= sum >> 32;
    return sum;
}

}  // namespace

uint64_t checksum(Pool& pool, const uint8_t* data, size_t bytes) {
    std::vector<uint64_t> sums((bytes + kChunk - 1) / kChunk);
    pool.parallel_for(static_cast<int64_t>(sums.size()), [&](int64_t index) {
        const uint8_t* begin = data + index * kChunk;
        const size_t size = std::min(kChunk, bytes - index * kChunk);
        fetch_pages(begin, size);
        sums[index] = sum_chunk(begin, size);
    });
    uint64_t sum = 0;
    for (uint64_t chunk : sums) sum = (sum ^ chunk) * 0x9E3779B97F4A7C15u, sum ^= sum >> 32;
    return sum;
}

}  // namespace treadle
