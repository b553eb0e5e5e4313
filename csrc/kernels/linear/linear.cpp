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

LinearKernels linear_kernels(Isa isa, Format format) {
    switch (isa) {
    case Isa::ref: return ref::linear_kernels(format);
    case Isa::avx2: return avx2::linear_kernels(format);
    case Isa::avx512: return avx512::linear_kernels(format);
    case Isa::vnni: return vnni::linear_kernels(format);
    case Isa::bf16: return bf16::linear_kernels(format);
    }
    return {};
}

}  // namespace treadle
