#include "base/isa.h"

#include <cstdlib>
#include <stdexcept>
#include <string>

namespace treadle {

namespace {

constexpr std::string_view kNames[] = {"ref", "avx2", "avx512", "vnni", "bf16"};

bool cpu_has(Isa isa) {
    // GCC's built-ins check XCR0 too: a level counts only when the kernel saves its registers.
    switch (isa) {
    case Isa::ref: return true;
    case Isa::avx2:
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
               __builtin_cpu_supports("f16c");
    case Isa::avx512:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case Isa::vnni: return __builtin_cpu_supports("avx512vnni");
    case Isa::bf16: return __builtin_cpu_supports("avx512bf16");
    }
    return false;
}

}  // namespace

std::string_view isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

std::vector<Isa> available_isas() {
    std::vector<Isa> found;
    for (Isa isa : {Isa::ref, Isa::avx2, Isa::avx512, Isa::vnni, Isa::bf16}) {
        if (!cpu_has(isa)) break;
        found.push_back(isa);
    }
    return found;
}

Isa isa_from_name(std::string_view name) {
    std::string allowed;
    for (Isa isa : available_isas()) {
        if (isa_name(isa) == name) return isa;
        allowed += (allowed.empty() ? "" : ", ") + std::string(isa_name(isa));
    }
    throw std::invalid_argument("ISA " + std::string(name) + " does not run on this CPU; it can be one of " +
                                allowed);
}

Isa select_isa() {
    const std::vector<Isa> found = available_isas();
    const char* wanted = std::getenv("TREADLE_ISA");
    if (wanted == nullptr || *wanted == '\0') return found.back();
    std::string allowed;
    for (Isa isa : found) {
        if (isa_name(isa) == wanted) return isa;
        allowed += (allowed.empty() ? "" : ", ") + std::string(isa_name(isa));
    }
    throw std::runtime_error("TREADLE_ISA=" + std::string(wanted) +
                             " does not run on this CPU; it can be one of " + allowed +
                             ", or unset for the best");
}

}  // namespace treadle
