// The table of one ISA's kernels. Included by ISA-specific sources inside their namespace, after a SIMD
// header; TREADLE_TILE_ROWS is the number of rows whose accumulators, partial sums and weights fit the
// register file, TREADLE_TWO_BYTE_ROWS the same with two accumulators per row.

#include "kernels/linear/tile_float.h"
#include "kernels/linear/tile_int.h"

template <Format kFormat, int kRows>
void any_tile(const LinearTile& t) {
    if constexpr (is_float(kFormat))
        float_tile<kFormat, kRows>(t);
    else
        int_tile<kFormat, kRows, false>(t);
}

template <Format kFormat>
LinearKernels format_kernels() {
    LinearKernels kernels;
    kernels.max_rows = TREADLE_TILE_ROWS;
    [&]<int... kRow>(std::integer_sequence<int, kRow...>) {
        ((kernels.tile[kRow] = any_tile<kFormat, kRow + 1>), ...);
    }(std::make_integer_sequence<int, TREADLE_TILE_ROWS>{});
    if constexpr (!is_float(kFormat) && !info(kFormat).super) {
        kernels.max_two_byte_rows = TREADLE_TWO_BYTE_ROWS;
        [&]<int... kRow>(std::integer_sequence<int, kRow...>) {
            ((kernels.two_byte_tile[kRow] = int_tile<kFormat, kRow + 1, true>), ...);
        }(std::make_integer_sequence<int, TREADLE_TWO_BYTE_ROWS>{});
    }
#ifdef TREADLE_BF16
    kernels.bf16_activations = kFormat == Format::bf16;
#endif
    return kernels;
}

LinearKernels linear_kernels(Format format) {
    LinearKernels kernels;
    [&]<int... kFormat>(std::integer_sequence<int, kFormat...>) {
        ((static_cast<int>(format) == kFormat ? void(kernels = format_kernels<static_cast<Format>(kFormat)>())
                                              : void()),
         ...);
    }(std::make_integer_sequence<int, kFormats>{});
    return kernels;
}
