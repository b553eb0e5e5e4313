#include "base/isa.h"

#include <cstdlib>
#include <optional>
#include <stdexcept>
#include <string>

#include "base/amx.h"

namespace treadle {

namespace {

constexpr std::string_view kNames[] = {"ref", "avx2", "amx-emulated", "avx512", "vnni", "bf16", "amx"};

bool cpu_has(Isa isa) {
    // GCC's built-ins check XCR0 too: a level counts only when the kernel saves its registers.
    switch (isa) {
    case Isa::ref:
    case Isa::amx_emulated: return true;
    case Isa::avx2:
        return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
               __builtin_cpu_supports("f16c");
    case Isa::avx512:
        return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
               __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
    case Isa::vnni: return __builtin_cpu_supports("avx512vnni");
    case Isa::bf16: return __builtin_cpu_supports("avx512bf16");
    case Isa::amx: return amx_lack().empty();
    }
    return false;
}

// Looks no further than the level of that name, so that a lower one never asks for permission to use AMX.
std::optional<Isa> find(std::string_view name) {
    for (Isa isa : {Isa::ref, Isa::avx2, Isa::amx_emulated, Isa::avx512, Isa::vnni, Isa::bf16, Isa::amx}) {
        if (!cpu_has(isa)) return std::nullopt;
        if (isa_name(isa) == name) return isa;
    }
    return std::nullopt;
}

// "foo does not run on this CPU (why); it can be one of ref, ..."
std::string complaint(std::string_view name) {
    std::string text = std::string(name) + " does not run on this CPU";
    if (name == isa_name(Isa::amx) && !amx_lack().empty()) text += " (" + amx_lack() + ")";
    text += "; it can be one of ";
    bool first = true;
    for (Isa isa : available_isas()) {
        text += (first ? "" : ", ") + std::string(isa_name(isa));
        first = false;
    }
    return text;
}

}  // namespace

std::string_view isa_name(Isa isa) { return kNames[static_cast<int>(isa)]; }

std::vector<Isa> available_isas() {
    std::vector<Isa> found;
    for (Isa isa : {Isa::ref, Isa::avx2, Isa::avx512, Isa::vnni, Isa::bf16, Isa::amx}) {
        if (!cpu_has(isa)) break;
        found.push_back(isa);
    }
    return found;
}

Isa isa_from_name(std::string_view name) {
    if (const std::optional<Isa> isa = find(name)) return *isa;
    throw std::invalid_argument("ISA " + complaint(name));
}

Isa select_isa() {
    const char* wanted = std::getenv("TREADLE_ISA");
    if (wanted == nullptr || *wanted == '\0') return available_isas().back();
    if (const std::optional<Isa> isa = find(wanted)) return *isa;
    throw std::runtime_error("TREADLE_ISA=" + complaint(wanted) + ", or unset for the best");
}

}  // namespace treadle
