// In place of csrc/base/memory.cpp: memory on the heap, of which AddressSanitizer knows the ends.
#include "base/memory.h"

#include <cstdlib>
#include <cstring>
#include <new>
#include <utility>

namespace treadle {

Memory::Memory(size_t bytes) : size_(bytes) {
    if (bytes == 0) return;
    void* block = nullptr;
    if (posix_memalign(&block, 64, bytes) != 0) throw std::bad_alloc();
    std::memset(block, 0, bytes);
    data_ = static_cast<uint8_t*>(block);
}

Memory Memory::resident(size_t bytes) { return Memory(bytes); }

Memory::~Memory() { std::free(data_); }

Memory& Memory::operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

void fetch_pages(const uint8_t*, size_t) {}

void release_pages(const uint8_t*, size_t) {}

}  // namespace treadle
