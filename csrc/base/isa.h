// Which instruction sets this CPU, and the operating system under it, let us use.
#pragma once

#include <string_view>
#include <vector>

namespace treadle {

// Ordered: each level includes those before it. `ref` is plain scalar code, for tests.
enum class Isa { ref, avx2, avx512, vnni, bf16 };

std::string_view isa_name(Isa isa);

// Every level that runs here, lowest first.
std::vector<Isa> available_isas();

// The level of that name. Throws std::invalid_argument when it is unknown or does not run here.
Isa isa_from_name(std::string_view name);

// The level named by TREADLE_ISA, or the highest one. Throws std::runtime_error with the allowed names.
Isa select_isa();

}  // namespace treadle
