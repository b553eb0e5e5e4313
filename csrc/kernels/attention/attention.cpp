#include "kernels/attention/attention.h"

namespace treadle {

namespace ref {
AttentionKernels attention_kernels();
}
namespace avx2 {
AttentionKernels attention_kernels();
}
namespace avx512 {
AttentionKernels attention_kernels();
}
namespace bf16 {
AttentionKernels attention_kernels();
}

AttentionKernels attention_kernels(Isa isa) {
    switch (isa) {
    case Isa::ref: return ref::attention_kernels();
    case Isa::avx2:
    case Isa::amx_emulated: return avx2::attention_kernels();
    case Isa::avx512:
    case Isa::vnni: return avx512::attention_kernels();
    case Isa::bf16:
    case Isa::amx: return bf16::attention_kernels();
    }
    return {};
}

}  // namespace treadle
