#define TREADLE_VNNI
#define TREADLE_BF16

#include <immintrin.h>

#include <utility>

#include "kernels/attention/attention.h"

namespace treadle::bf16 {

#include "kernels/simd/simd_avx512.h"
#include "kernels/attention/attention_simd.h"

}  // namespace treadle::bf16
