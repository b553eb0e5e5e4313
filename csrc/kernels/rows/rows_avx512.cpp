#include <immintrin.h>

#include "kernels/rows/rows.h"

namespace treadle::avx512 {

#include "kernels/simd/simd_avx512.h"
#include "kernels/rows/rows_simd.h"

}  // namespace treadle::avx512
