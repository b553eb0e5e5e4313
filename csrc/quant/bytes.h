// Little-endian integers at any address.
#pragma once

#include <cstdint>
#include <cstring>

namespace treadle {

inline uint16_t load16(const uint8_t* p) {
    uint16_t value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

inline uint32_t load32(const uint8_t* p) {
    uint32_t value;
    std::memcpy(&value, p, sizeof value);
    return value;
}

}  // namespace treadle
