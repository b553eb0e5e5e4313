#include "bench/read.h"

#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <new>

#include "base/isa.h"

namespace treadle {

namespace {

// A strip small enough that a slow worker holds the others up by a fraction of a pass only, and large enough
// that claiming it and restarting the hardware prefetcher costs nothing.
constexpr size_t kStrip = size_t{1} << 20;

class Mapping {
public:
    explicit Mapping(size_t bytes) : bytes_(bytes) {
        void* at = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (at == MAP_FAILED) throw std::bad_alloc();
        data_ = static_cast<char*>(at);
        madvise(data_, bytes, MADV_HUGEPAGE);  // a hint: the measurement stays valid without
    }
    ~Mapping() { munmap(data_, bytes_); }
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;

    char* data() const { return data_; }

private:
    char* data_;
    size_t bytes_;
};

// Plain scalar loads keep up with memory only on some CPUs, but every machine has this fallback.
long sum_scalar(const char* data, size_t bytes) {
    long total = 0;
    for (size_t i = 0; i < bytes; i += sizeof(long)) {
        long value;
        std::memcpy(&value, data + i, sizeof value);
        total += value;
    }
    return total;
}

}  // namespace

std::vector<double> time_reads(Pool& pool, size_t bytes, int passes) {
    const int64_t strips = static_cast<int64_t>((bytes + kStrip - 1) / kStrip);
    const Mapping memory(static_cast<size_t>(strips) * kStrip);
    const bool avx2 = available_isas().size() > 1;
    // Written first, or every page would be the kernel's one zero page.
    pool.parallel_for(strips, [&](int64_t i) { std::memset(memory.data() + i * kStrip, 1, kStrip); });
    std::vector<double> seconds;
    for (int pass = 0; pass < passes; ++pass) {
        const auto start = std::chrono::steady_clock::now();
        pool.parallel_for(strips, [&](int64_t i) {
            const char* strip = memory.data() + i * kStrip;
            const long total = avx2 ? bench_avx2::sum(strip, kStrip) : sum_scalar(strip, kStrip);
            asm volatile("" : : "r"(total));
        });
        seconds.push_back(std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    return seconds;
}

}  // namespace treadle
