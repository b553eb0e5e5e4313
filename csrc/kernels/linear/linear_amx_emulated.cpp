// The kernels of linear_amx.cpp with tiles in plain code and AVX2: for tests on machines without AMX.
#include <immintrin.h>

#include <cstring>
#include <utility>

#include "kernels/linear/linear.h"

namespace treadle::amx_emulated {

#include "kernels/simd/simd_avx2.h"
#include "kernels/simd/tile_emulated.h"

#include "kernels/linear/blocks.h"

}  // namespace treadle::amx_emulated
