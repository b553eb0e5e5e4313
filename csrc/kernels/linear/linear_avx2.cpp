// 16 registers, two per vector of 16 lanes: 4 rows of accumulators take 8, the weights and their masks the
// rest.
#define TREADLE_TILE_ROWS 4
#define TREADLE_TWO_BYTE_ROWS 2

#include <immintrin.h>

#include <utility>

#include "kernels/linear/linear.h"

namespace treadle::avx2 {

#include "kernels/simd/simd_avx2.h"
#include "kernels/linear/tiles.h"

}  // namespace treadle::avx2
