// AVX2 has 16 registers: 12 accumulators, more than latency x ports (4 x 2), leave room for the operands.
#include <immintrin.h>

#include "bench/peak.h"

namespace treadle::bench_avx2 {

namespace {

constexpr int kAccumulators = 12;

// u8 x s8 as the linear kernels do it: pairs to 16 bit, four products to 32 bit, add. Three instructions.
void int8(int64_t iterations) {
    __m256i sums[kAccumulators] = {};
    __m256i a = _mm256_set1_epi8(3), b = _mm256_set1_epi8(-2);
    const __m256i ones = _mm256_set1_epi16(1);
    for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 32
        for (__m256i& sum : sums) {
            asm volatile("" : "+x"(a));  // the product must not leave the loop
            sum = _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), ones));
        }
    }
#pragma GCC unroll 32
    for (__m256i& sum : sums) asm volatile("" : : "x"(sum));
}

void f32(int64_t iterations) {
    __m256 sums[kAccumulators] = {};
    const __m256 a = _mm256_set1_ps(1.0f), b = _mm256_set1_ps(1e-3f);
    for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 32
        for (__m256& sum : sums) {
            sum = _mm256_fmadd_ps(a, b, sum);
            asm volatile("" : "+x"(sum));
        }
    }
}

}  // namespace

const PeakKernel kInt8{Isa::avx2, "int8", kAccumulators * 64, int8};
const PeakKernel kF32{Isa::avx2, "f32", kAccumulators * 16, f32};

}  // namespace treadle::bench_avx2
