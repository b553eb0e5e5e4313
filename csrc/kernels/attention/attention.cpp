#include "kernels/attention/attention.h"

#include <stdexcept>
#include <string>

namespace treadle {

namespace ref {
AttentionKernels attention_kernels(KvType type);
}
namespace avx2 {
AttentionKernels attention_kernels(KvType type);
}
namespace avx512 {
AttentionKernels attention_kernels(KvType type);
}
namespace vnni {
AttentionKernels attention_kernels(KvType type);
}
namespace bf16 {
AttentionKernels attention_kernels(KvType type);
}

KvType kv_type_from_name(std::string_view name) {
    if (name == "bf16") return KvType::bf16;
    if (name == "q8") return KvType::q8;
    if (name == "q4") return KvType::q4;
    throw std::invalid_argument("KV type " + std::string(name) + " is not one of bf16, q8, q4");
}

int64_t head_block_bytes(KvType type, int head_dim) {
    const int64_t values = int64_t{2} * kBlock * head_dim;
    constexpr int64_t kScales = int64_t{2} * kBlock * 2;
    if (head_dim <= 0 || head_dim % 16 != 0 || head_dim > 256)
        throw std::invalid_argument("heads of " + std::to_string(head_dim) +
                                    " dimensions: must be a multiple of 16, at most 256");
    if (type == KvType::bf16) return 2 * values;
    if (type == KvType::q8) return values + kScales;
    if (head_dim % 32 != 0)
        throw std::invalid_argument(
            "a q4 KV cache needs heads of a multiple of 32 dimensions, this model's have " +
            std::to_string(head_dim) + "; use q8 or bf16");
    return values / 2 + kScales;
}

AttentionKernels attention_kernels(Isa isa, KvType type) {
    switch (isa) {
    case Isa::ref: return ref::attention_kernels(type);
    case Isa::avx2:
    case Isa::amx_emulated: return avx2::attention_kernels(type);
    case Isa::avx512: return avx512::attention_kernels(type);
    case Isa::vnni: return vnni::attention_kernels(type);
    case Isa::bf16:
    case Isa::amx: return bf16::attention_kernels(type);
    }
    return {};
}

}  // namespace treadle
