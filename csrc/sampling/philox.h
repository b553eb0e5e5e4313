// Philox4x32-10, a counter-based random generator: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as
// easy as 1, 2, 3", SC 2011. A draw is a pure function of (seed, position), so it depends on no thread,
// neighbour or history.
#pragma once

#include <array>
#include <cstdint>

namespace treadle {

inline std::array<uint32_t, 4> philox4x32(uint64_t key, uint64_t position) {
    auto k0 = static_cast<uint32_t>(key);
    auto k1 = static_cast<uint32_t>(key >> 32);
    std::array<uint32_t, 4> c{static_cast<uint32_t>(position), static_cast<uint32_t>(position >> 32), 0, 0};
    for (int round = 0; round < 10; ++round) {
        const uint64_t p0 = uint64_t{0xD2511F53} * c[0];
        const uint64_t p1 = uint64_t{0xCD9E8D57} * c[2];
        c = {static_cast<uint32_t>(p1 >> 32) ^ c[1] ^ k0, static_cast<uint32_t>(p1),
             static_cast<uint32_t>(p0 >> 32) ^ c[3] ^ k1, static_cast<uint32_t>(p0)};
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return c;
}

// Uniform in [0, 1) with 53 random bits.
inline double philox_uniform(uint64_t seed, uint64_t position) {
    const std::array<uint32_t, 4> words = philox4x32(seed, position);
    const uint64_t bits = (uint64_t{words[1]} << 32 | words[0]) >> 11;
    return static_cast<double>(bits) * 0x1p-53;
}

}  // namespace treadle
