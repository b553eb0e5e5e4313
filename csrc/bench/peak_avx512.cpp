// 24 of the 32 registers accumulate.
#include <immintrin.h>

#include "bench/peak.h"

namespace treadle::bench_avx512 {

namespace {

constexpr int kAccumulators = 24;

void int8(int64_t iterations) {
    __m512i sums[kAccumulators] = {};
    __m512i a = _mm512_set1_epi8(3), b = _mm512_set1_epi8(-2);
    const __m512i ones = _mm512_set1_epi16(1);
    for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 32
        for (__m512i& sum : sums) {
            asm volatile("" : "+v"(a));  // the product must not leave the loop
            sum = _mm512_add_epi32(sum, _mm512_madd_epi16(_mm512_maddubs_epi16(a, b), ones));
        }
    }
#pragma GCC unroll 32
    for (__m512i& sum : sums) asm volatile("" : : "v"(sum));
}

void f32(int64_t iterations) {
    __m512 sums[kAccumulators] = {};
    const __m512 a = _mm512_set1_ps(1.0f), b = _mm512_set1_ps(1e-3f);
    for (int64_t i = 0; i < iterations; ++i) {
#pragma GCC unroll 32
        for (__m512& sum : sums) {
            sum = _mm512_fmadd_ps(a, b, sum);
            asm volatile("" : "+v"(sum));
        }
    }
}

}  // namespace

const PeakKernel kInt8{Isa::avx512, "int8", kAccumulators * 128, int8};
const PeakKernel kF32{Isa::avx512, "f32", kAccumulators * 32, f32};

}  // namespace treadle::bench_avx512
