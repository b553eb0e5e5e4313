#include <immintrin.h>

#include <utility>

#include "kernels/attention/attention.h"

namespace treadle::avx2 {

#include "kernels/simd/simd_avx2.h"
#include "kernels/attention/attention_simd.h"

}  // namespace treadle::avx2
