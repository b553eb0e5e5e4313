#define TREADLE_VNNI

#include <immintrin.h>

#include <utility>

#include "kernels/attention/attention.h"

namespace treadle::vnni {

#include "kernels/simd/simd_avx512.h"
#include "kernels/attention/attention_simd.h"

}  // namespace treadle::vnni
