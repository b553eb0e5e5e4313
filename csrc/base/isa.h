// Which instruction sets this CPU, and the operating system under it, let us use.
#pragma once

#include <string_view>
#include <vector>

namespace treadle {

// Ordered: each level includes those before it. Two are for tests and never chosen on their own: `ref` is
// plain scalar code; `amx_emulated` is avx2 with the kernels of amx, whose tile instructions are done in
// plain code.
enum class Isa { ref, avx2, amx_emulated, avx512, vnni, bf16, amx };

std::string_view isa_name(Isa isa);

// Every level that runs here, lowest first, without amx_emulated, which always does.
std::vector<Isa> available_isas();

// The level of that name. Throws std::invalid_argument when it is unknown or does not run here.
Isa isa_from_name(std::string_view name);

// The level named by TREADLE_ISA, or the highest one. Throws std::runtime_error with the allowed names.
Isa select_isa();

}  // namespace treadle
