#define TREADLE_VNNI
#define TREADLE_BF16

#include <immintrin.h>

#include "kernels/rows/rows.h"

namespace treadle::bf16 {

#include "kernels/simd/simd_avx512.h"
#include "kernels/rows/rows_simd.h"

}  // namespace treadle::bf16
