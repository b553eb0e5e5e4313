// Large anonymous memory, in huge pages where the system grants them.
#pragma once

#include <cstddef>
#include <cstdint>

namespace treadle {

class Memory {
public:
    Memory() = default;
    // Zero-filled. Throws std::bad_alloc.
    explicit Memory(size_t bytes);
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

}  // namespace treadle
