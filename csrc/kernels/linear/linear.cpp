#include "kernels/linear/linear.h"

namespace treadle {

namespace ref {
LinearKernels linear_kernels(Format format);
}
namespace avx2 {
LinearKernels linear_kernels(Format format);
}
namespace avx512 {
LinearKernels linear_kernels(Format format);
}
namespace vnni {
LinearKernels linear_kernels(Format format);
}
namespace bf16 {
LinearKernels linear_kernels(Format format);
}
// Block kernels in addition to the tiles of another level.
namespace amx {
void add_blocks(Format format, LinearKernels& kernels);
}
namespace amx_emulated {
void add_blocks(Format format, LinearKernels& kernels);
}

LinearKernels linear_kernels(Isa isa, Format format) {
    LinearKernels kernels;
    switch (isa) {
    case Isa::ref: return ref::linear_kernels(format);
    case Isa::avx2: return avx2::linear_kernels(format);
    case Isa::avx512: return avx512::linear_kernels(format);
    case Isa::vnni: return vnni::linear_kernels(format);
    case Isa::bf16: return bf16::linear_kernels(format);
    case Isa::amx_emulated:
        kernels = avx2::linear_kernels(format);
        amx_emulated::add_blocks(format, kernels);
        return kernels;
    case Isa::amx:
        kernels = bf16::linear_kernels(format);
        amx::add_blocks(format, kernels);
        return kernels;
    }
    return {};
}

}  // namespace treadle
