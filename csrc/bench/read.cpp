#include "bench/read.h"

#include <immintrin.h>
#include <sys/mman.h>

#include <chrono>
#include <cstring>
#include <new>

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

// Loads [data, data + kStrip) and returns a value that depends on all of it. Four streams a quarter apart
// keep more DRAM pages and prefetchers busy than one would; two cache lines of each per round.
int64_t sum(const char* data) {
    constexpr size_t kQuarter = kStrip / 4;
    __m256i totals[4] = {};
    for (size_t i = 0; i < kQuarter; i += 128) {
        for (size_t stream = 0; stream < 4; ++stream) {
            const auto* at = reinterpret_cast<const __m256i*>(data + stream * kQuarter + i);
            const __m256i first = _mm256_add_epi64(_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1));
            const __m256i second = _mm256_add_epi64(_mm256_loadu_si256(at + 2), _mm256_loadu_si256(at + 3));
            totals[stream] = _mm256_add_epi64(totals[stream], _mm256_add_epi64(first, second));
        }
    }
    const __m256i all =
        _mm256_add_epi64(_mm256_add_epi64(totals[0], totals[1]), _mm256_add_epi64(totals[2], totals[3]));
    return _mm256_extract_epi64(all, 0) + _mm256_extract_epi64(all, 1) + _mm256_extract_epi64(all, 2) +
           _mm256_extract_epi64(all, 3);
}

}  // namespace

std::vector<double> time_reads(Pool& pool, size_t bytes, int passes) {
    const int64_t strips = static_cast<int64_t>((bytes + kStrip - 1) / kStrip);
    const Mapping memory(static_cast<size_t>(strips) * kStrip);
    // Written first, or every page would be the kernel's one zero page.
    pool.parallel_for(strips, [&](int64_t i) { std::memset(memory.data() + i * kStrip, 1, kStrip); });
    std::vector<double> seconds;
    for (int pass = -1; pass < passes; ++pass) {  // the first one only warms up
        const auto start = std::chrono::steady_clock::now();
        pool.parallel_for(strips, [&](int64_t i) {
            const int64_t total = sum(memory.data() + i * kStrip);
            asm volatile("" : : "r"(total));  // the loads must not be optimised away
        });
        const std::chrono::duration<double> taken = std::chrono::steady_clock::now() - start;
        if (pass >= 0) seconds.push_back(taken.count());
    }
    return seconds;
}

}  // namespace treadle
