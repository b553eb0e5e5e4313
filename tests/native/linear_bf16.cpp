// The linear kernels of this level with up to 2 rows per tile instead of all, which take minutes to compile
// with sanitizers: what a tile reads and writes for each of its rows is the same.
#define TREADLE_TILE_ROWS 2
#define TREADLE_TWO_BYTE_ROWS 1
#define TREADLE_VNNI
#define TREADLE_BF16

#include <immintrin.h>

#include <utility>

#include "kernels/linear/linear.h"

namespace treadle::bf16 {

#include "kernels/simd/simd_avx512.h"
#include "kernels/linear/tiles.h"

}  // namespace treadle::bf16
