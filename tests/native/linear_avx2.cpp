// The linear kernels of this level with up to 2 rows per tile instead of all, which take minutes to compile
// with sanitizers: what a tile reads and writes for each of its rows is the same.
#define TREADLE_TILE_ROWS 2
#define TREADLE_TWO_BYTE_ROWS 1

#include <immintrin.h>

#include <utility>

#include "kernels/linear/linear.h"

namespace treadle::avx2 {

#include "kernels/simd/simd_avx2.h"
#include "kernels/linear/tiles.h"

}  // namespace treadle::avx2

// Levels that the test leaves out.
namespace treadle::avx512 {
LinearKernels linear_kernels(Format) { return {}; }
}  // namespace treadle::avx512
namespace treadle::vnni {
LinearKernels linear_kernels(Format) { return {}; }
}  // namespace treadle::vnni
namespace treadle::amx_emulated {
void add_blocks(Format, LinearKernels&) {}
}  // namespace treadle::amx_emulated
