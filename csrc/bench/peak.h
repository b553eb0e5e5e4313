// Arithmetic peaks: loops of independent multiply-adds that touch no memory.
#pragma once

#include <cstdint>
#include <vector>

#include "base/isa.h"

namespace treadle {

struct PeakKernel {
    Isa isa;
    const char* type;    // "int8", "bf16" or "f32"
    int64_t operations;  // per iteration; a multiply and an add count as two
    void (*run)(int64_t iterations);
};

// The kernels up to the ISA that select_isa() allows, lowest first.
std::vector<PeakKernel> peak_kernels();

// One per file, so that each is compiled for its own ISA.
namespace bench_avx2 {
extern const PeakKernel kInt8, kF32;
}
namespace bench_avx512 {
extern const PeakKernel kInt8, kF32;
}
namespace bench_vnni {
extern const PeakKernel kInt8;
}
namespace bench_bf16 {
extern const PeakKernel kBf16;
}
namespace bench_amx {
extern const PeakKernel kInt8, kBf16;
}

}  // namespace treadle
