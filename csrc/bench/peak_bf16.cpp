// 24 of the 32 registers accumulate; vdpbf16ps does 32 multiply-adds.
#include <immintrin.h>

#include "bench/peak.h"

namespace treadle::bench_bf16 {

namespace {

constexpr int kAccumulators = 24;

void bf16(int64_t iterations) {
    __m512 sums[kAccumulators] = {};
    const __m512bh a = _mm512_cvtne2ps_pbh(_mm512_set1_ps(1.0f), _mm512_set1_ps(1.0f));
    const __m512bh b = _mm512_cvtne2ps_pbh(_mm512_set1_ps(1e-3f), _mm512_set1_ps(1e-3f));
    for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 32
        for (__m512& sum : sums) {
            sum = _mm512_dpbf16_ps(sum, a, b);
            asm volatile("" : "+v"(sum));
        }
    }
}

}  // namespace

const PeakKernel kBf16{Isa::bf16, "bf16", kAccumulators * 64, bf16};

}  // namespace treadle::bench_bf16
