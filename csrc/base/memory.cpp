#include "base/memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <new>
#include <utility>

namespace treadle {

namespace {

void advise(const uint8_t* data, size_t bytes, int advice) {
    const auto page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
    const auto address = reinterpret_cast<uintptr_t>(data);
    const uintptr_t begin = address & ~(page - 1), end = (address + bytes + page - 1) & ~(page - 1);
    madvise(reinterpret_cast<void*>(begin), end - begin, advice);  // a refusal only costs speed or memory
}

}  // namespace

Memory::Memory(size_t bytes) : size_(bytes) {
    if (bytes == 0) return;
    constexpr size_t kHuge = size_t{2} << 20;
    if (bytes > SIZE_MAX - kHuge) throw std::bad_alloc();
    // Round up to whole huge pages and let the kernel align: mappings of that size start on a huge page since
    // Linux 6.7, and khugepaged handles the unaligned edges of older ones.
    if (bytes >= kHuge) size_ = (bytes + kHuge - 1) & ~(kHuge - 1);
    void* mapped = mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (mapped == MAP_FAILED) throw std::bad_alloc();
    madvise(mapped, size_, MADV_HUGEPAGE);  // a refusal only costs speed
    data_ = static_cast<uint8_t*>(mapped);
}

Memory Memory::resident(size_t bytes) {
    Memory memory(bytes);
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    volatile uint8_t* data = memory.data_;
    for (size_t at = 0; at < memory.size_; at += page) data[at] = 0;
    return memory;
}

Memory::~Memory() {
    if (data_ != nullptr) munmap(data_, size_);
}

Memory& Memory::operator=(Memory&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(size_, other.size_);
    return *this;
}

void fetch_pages(const uint8_t* data, size_t bytes) {
#ifdef MADV_POPULATE_READ  // Linux 5.14
    advise(data, bytes, MADV_POPULATE_READ);
#else
    advise(data, bytes, MADV_WILLNEED);
#endif
}

void release_pages(const uint8_t* data, size_t bytes) { advise(data, bytes, MADV_DONTNEED); }

}  // namespace treadle
