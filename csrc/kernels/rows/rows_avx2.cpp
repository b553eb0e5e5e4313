#include <immintrin.h>

#include "kernels/rows/rows.h"

namespace treadle::avx2 {

#include "kernels/simd/simd_avx2.h"
#include "kernels/rows/rows_simd.h"

}  // namespace treadle::avx2
