// Large anonymous memory, in huge pages where the system grants them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace treadle {

class Memory {
public:
    Memory() = default;
    // Zero-filled. The system gives a page when it is first written. Throws std::bad_alloc.
    explicit Memory(size_t bytes);
    // The same with all pages given at once, so that a process does not grow while it works.
    static Memory resident(size_t bytes);
    ~Memory();
    Memory(Memory&& other) noexcept { *this = static_cast<Memory&&>(other); }
    Memory& operator=(Memory&& other) noexcept;

    uint8_t* data() const { return data_; }
    size_t size() const { return size_; }

    template <class T>
    T* as() const {
        return reinterpret_cast<T*>(data_);
    }

private:
    uint8_t* data_ = nullptr;
    size_t size_ = 0;
};

// For memory of a mapped file. Maps all pages that hold these bytes at once, which costs a fraction of a
// fault for each; what is not in the page cache is read.
void fetch_pages(const uint8_t* data, size_t bytes);

// Takes all pages that hold these bytes out of the process; they stay in the page cache, and reading them
// maps them again. Neighbours' bytes in the first and the last page go with them.
void release_pages(const uint8_t* data, size_t bytes);

}  // namespace treadle
