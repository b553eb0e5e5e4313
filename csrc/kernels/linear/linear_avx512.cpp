// 32 registers: 12 accumulators, 12 partial sums, the weights of a step and the masks that unpack them.
#define TREADLE_TILE_ROWS 12
#define TREADLE_TWO_BYTE_ROWS 8

#include <immintrin.h>

#include <utility>

#include "kernels/linear/linear.h"

namespace treadle::avx512 {

#include "kernels/simd/simd_avx512.h"
#include "kernels/linear/tiles.h"

}  // namespace treadle::avx512
