// Permission to use AMX (tile registers): CPU, operating system and this process.
#pragma once

#include <cstdint>
#include <string>

namespace treadle {

// Why AMX cannot be used with these facts, or "" when it can:
//   leaf7_edx    CPUID leaf 7, EDX: bit 22 AMX-BF16, 24 AMX-TILE, 25 AMX-INT8
//   xcr0         bits 17 and 18: the system saves tile configuration and tile data
//   permission   errno of the system's answer to the request for permission, 0 if granted
std::string amx_lack(uint32_t leaf7_edx, uint64_t xcr0, int permission);

// The same for this process. The first call on a CPU with AMX asks the kernel for permission, which then
// holds for all threads and for children of the process, and is never given back
// (Linux, Documentation/arch/x86/xstate.rst).
const std::string& amx_lack();

}  // namespace treadle
