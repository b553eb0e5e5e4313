#include <immintrin.h>

#include "bench/read.h"

namespace treadle::bench_avx2 {

long sum(const char* data, size_t bytes) {
    // Four streams a quarter apart: more open pages and prefetch streams than one. Two lines of each per round.
    const size_t quarter = bytes / 4;
    __m256i totals[4] = {};
    for (size_t i = 0; i < quarter; i += 128) {
        for (int stream = 0; stream < 4; ++stream) {
            const auto* at = reinterpret_cast<const __m256i*>(data + stream * quarter + i);
            totals[stream] = _mm256_add_epi64(
                totals[stream], _mm256_add_epi64(_mm256_add_epi64(_mm256_loadu_si256(at), _mm256_loadu_si256(at + 1)),
                                                 _mm256_add_epi64(_mm256_loadu_si256(at + 2), _mm256_loadu_si256(at + 3))));
        }
    }
    const __m256i all = _mm256_add_epi64(_mm256_add_epi64(totals[0], totals[1]), _mm256_add_epi64(totals[2], totals[3]));
    return _mm256_extract_epi64(all, 0) + _mm256_extract_epi64(all, 1) + _mm256_extract_epi64(all, 2) +
           _mm256_extract_epi64(all, 3);
}

}  // namespace treadle::bench_avx2
