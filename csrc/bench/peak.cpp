#include "bench/peak.h"

namespace treadle {

std::vector<PeakKernel> peak_kernels() {
    const Isa highest = select_isa();
    std::vector<PeakKernel> found;
    for (const PeakKernel& kernel :
         {bench_avx2::kInt8, bench_avx2::kF32, bench_avx512::kInt8, bench_avx512::kF32, bench_vnni::kInt8,
          bench_bf16::kBf16, bench_amx::kInt8, bench_amx::kBf16}) {
        if (kernel.isa <= highest) found.push_back(kernel);
    }
    return found;
}

}  // namespace treadle
