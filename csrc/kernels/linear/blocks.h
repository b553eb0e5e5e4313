// The block kernels of one tile unit. Included by ISA-specific sources inside their namespace, after a SIMD
// header and a tile header.

#include "kernels/linear/tile_int.h"

#include "kernels/linear/block_int.h"

#include "kernels/linear/block_float.h"

// Rows from which a block is used. By count of instructions it is ahead from about 4 rows on, but up to 8 the
// tiles keep up with memory (docs/performance.md).
constexpr int64_t kMinBlockRows = 8;

template <Format kFormat>
void add_format_blocks(LinearKernels& kernels) {
    if constexpr (kFormat == Format::bf16) {
        // All rows, however few: the tile unit sums in an order of its own, and a row must not depend on its
        // neighbours.
        kernels.block = {1, Bf16Block::run, Bf16Block::configure, tile_release};
        kernels.bf16_activations = true;
    } else if constexpr (!is_float(kFormat)) {
        using Block = IntBlock<kFormat, false>;
        kernels.block = {kMinBlockRows, Block::run, Block::configure, tile_release};
        if constexpr (!info(kFormat).super) {
            using TwoByteBlock = IntBlock<kFormat, true>;
            kernels.two_byte_block = {kMinBlockRows, TwoByteBlock::run, TwoByteBlock::configure,
                                      tile_release};
        }
    }
}

void add_blocks(Format format, LinearKernels& kernels) {
    [&]<int... kFormat>(std::integer_sequence<int, kFormat...>) {
        ((static_cast<int>(format) == kFormat ? add_format_blocks<static_cast<Format>(kFormat)>(kernels)
                                              : void()),
         ...);
    }(std::make_integer_sequence<int, kFormats>{});
}
