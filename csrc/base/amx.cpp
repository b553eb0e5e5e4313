#include "base/amx.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

namespace treadle {

namespace {

constexpr uint32_t kFeatures = 1u << 22 | 1u << 24 | 1u << 25;
constexpr uint64_t kStates = uint64_t{1} << 17 | uint64_t{1} << 18;
constexpr int kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
constexpr int kTileData = 18;               // XFEATURE_XTILEDATA

uint64_t read_xcr0() {
    uint32_t low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return uint64_t{high} << 32 | low;
}

std::string ask() {
    uint32_t eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) edx = 0;
    const uint64_t xcr0 = read_xcr0();
    // Asking makes the signal frames of all threads larger, so only where it is of use.
    std::string lack = amx_lack(edx, xcr0, 0);
    if (lack.empty() && syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0)
        lack = amx_lack(edx, xcr0, errno);
    return lack;
}

}  // namespace

std::string amx_lack(uint32_t leaf7_edx, uint64_t xcr0, int permission) {
    if ((leaf7_edx & kFeatures) != kFeatures) return "it lacks AMX-TILE, AMX-INT8 or AMX-BF16";
    if ((xcr0 & kStates) != kStates) return "the operating system does not save its AMX registers";
    if (permission == ENOSPC)  // what the kernel says when the larger frame of a signal would not fit
        return "a thread's alternate signal stack is too small for AMX registers";
    if (permission != 0)
        return "the kernel gives this process no permission for its AMX registers: " +
               std::string(std::strerror(permission));
    return "";
}

const std::string& amx_lack() {
    static const std::string lack = ask();
    return lack;
}

}  // namespace treadle
