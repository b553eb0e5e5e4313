// 24 of the 32 registers accumulate; vpdpbusd does 64 multiply-adds.
#include <immintrin.h>

#include "bench/peak.h"

namespace treadle::bench_vnni {

namespace {

constexpr int kAccumulators = 24;

void int8(int64_t iterations) {
    __m512i sums[kAccumulators] = {};
    const __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(-2);
    for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 32
        for (__m512i& sum : sums) {
            sum = _mm512_dpbusd_epi32(sum, a, b);
            asm volatile("" : "+v"(sum));
        }
    }
}

}  // namespace

const PeakKernel kInt8{Isa::vnni, "int8", kAccumulators * 128, int8};

}  // namespace treadle::bench_vnni
