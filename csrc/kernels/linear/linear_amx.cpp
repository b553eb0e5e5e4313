#define TREADLE_VNNI
#define TREADLE_BF16

#include <immintrin.h>

#include <utility>

#include "kernels/linear/linear.h"

namespace treadle::amx {

#include "kernels/simd/simd_avx512.h"
#include "kernels/simd/tile_amx.h"

#include "kernels/linear/blocks.h"

}  // namespace treadle::amx
