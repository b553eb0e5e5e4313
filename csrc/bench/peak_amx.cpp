// Four of the eight tiles accumulate, so that no product waits for the one before; one does 16 x 16 x 64
// multiply-adds of int8, or half as many of bf16.
#include "bench/peak.h"

namespace treadle::bench_amx {

#include "kernels/simd/tile_amx.h"

namespace {

constexpr TileShape kFull{16, 64};

void int8(int64_t iterations) {
    tile_configure({kFull, kFull, kFull, kFull, kFull, kFull, kFull, kFull});
    for (int64_t i = 0; i < iterations; ++i) {
        tile_dot_bytes<0, 4, 6>();
        tile_dot_bytes<1, 4, 7>();
        tile_dot_bytes<2, 5, 6>();
        tile_dot_bytes<3, 5, 7>();
    }
    tile_release();
}

void bf16(int64_t iterations) {
    tile_configure({kFull, kFull, kFull, kFull, kFull, kFull, kFull, kFull});
    for (int64_t i = 0; i < iterations; ++i) {
        tile_dot_bf16<0, 4, 6>();
        tile_dot_bf16<1, 4, 7>();
        tile_dot_bf16<2, 5, 6>();
        tile_dot_bf16<3, 5, 7>();
    }
    tile_release();
}

}  // namespace

const PeakKernel kInt8{Isa::amx, "int8", 4 * 2 * 16 * 16 * 64, int8};
const PeakKernel kBf16{Isa::amx, "bf16", 4 * 2 * 16 * 16 * 32, bf16};

}  // namespace treadle::bench_amx
