// Wait on a 32-bit word: spin for a few microseconds, then sleep in the kernel (futex(2)).
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <climits>
#include <cstdint>

#include <immintrin.h>

namespace treadle {

// About 40 us at 3 GHz (a `pause` takes 40 to 140 cycles): longer than any chunk of work that is not late,
// short enough that an idle or descheduled process soon gives the core away.
inline constexpr int kSpins = 1500;

class Word {
public:
    explicit Word(uint32_t value = 0) : value_(value) {}

    uint32_t load() const { return value_.load(std::memory_order_acquire); }
    void store(uint32_t value) { value_.store(value, std::memory_order_release); }

    // Adds, and returns the new value.
    uint32_t add(uint32_t amount) { return value_.fetch_add(amount, std::memory_order_acq_rel) + amount; }

    // Wakes every thread that sleeps in wait(); a system call only when there is one.
    void wake() {
        std::atomic_thread_fence(std::memory_order_seq_cst);
        if (sleepers_.load(std::memory_order_relaxed) != 0)
            syscall(SYS_futex, address(), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
    }

    // Returns once done(value) holds.
    template <class Done>
    void wait(Done done) {
        for (int i = 0; i < kSpins; ++i) {
            if (done(load())) return;
            _mm_pause();
        }
        sleepers_.fetch_add(1, std::memory_order_relaxed);
        // Pairs with the fence in wake(): either this thread sees the new value, or the other sees the
        // sleeper.
        std::atomic_thread_fence(std::memory_order_seq_cst);
        for (uint32_t seen = load(); !done(seen); seen = load())
            syscall(SYS_futex, address(), FUTEX_WAIT_PRIVATE, seen, nullptr, nullptr, 0);
        sleepers_.fetch_sub(1, std::memory_order_relaxed);
    }

private:
    uint32_t* address() { return reinterpret_cast<uint32_t*>(&value_); }

    std::atomic<uint32_t> value_;
    std::atomic<uint32_t> sleepers_{0};
};

}  // namespace treadle
