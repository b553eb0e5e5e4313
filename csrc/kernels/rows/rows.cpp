#include "kernels/rows/rows.h"

namespace treadle {

namespace ref {
RowKernels row_kernels();
}
namespace avx2 {
RowKernels row_kernels();
}
namespace avx512 {
RowKernels row_kernels();
}
namespace bf16 {
RowKernels row_kernels();
}

RowKernels row_kernels(Isa isa) {
    switch (isa) {
    case Isa::ref: return ref::row_kernels();
    case Isa::avx2:
    case Isa::amx_emulated: return avx2::row_kernels();
    case Isa::avx512:
    case Isa::vnni: return avx512::row_kernels();
    case Isa::bf16:
    case Isa::amx: return bf16::row_kernels();
    }
    return {};
}

}  // namespace treadle
