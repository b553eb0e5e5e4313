// 32 registers: 10 accumulators, 10 partial sums, the weights of a step, the masks that unpack them and the
// activations on their way. 12 rows fit too, but are slower.
#define TREADLE_TILE_ROWS 10
#define TREADLE_TWO_BYTE_ROWS 8
#define TREADLE_VNNI

#include <immintrin.h>

#include <utility>

#include "kernels/linear/linear.h"

namespace treadle::vnni {

#include "kernels/simd/simd_avx512.h"
#include "kernels/linear/tiles.h"

}  // namespace treadle::vnni
