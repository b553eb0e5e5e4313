#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <stdexcept>
#include <string>

#include "base/isa.h"
#include "bench/peak.h"
#include "bench/read.h"
#include "threads/pool.h"

namespace nb = nanobind;

namespace treadle {

namespace {

using Clock = std::chrono::steady_clock;

double seconds_of(Pool& pool, const PeakKernel& kernel, int64_t iterations) {
    const auto start = Clock::now();
    pool.run([&](int) { kernel.run(iterations); });
    return std::chrono::duration<double>(Clock::now() - start).count();
}

// Operations per second of the whole pool, once per repeat of about `seconds`.
std::vector<double> measure_peak(Pool& pool, const std::string& isa, const std::string& type, double seconds,
                                 int repeats) {
    for (const PeakKernel& kernel : peak_kernels()) {
        if (isa_name(kernel.isa) != isa || kernel.type != type) continue;
        int64_t iterations = 1000;
        while (seconds_of(pool, kernel, iterations) < seconds / 2) iterations *= 2;
        std::vector<double> rates;
        for (int i = 0; i < repeats; ++i) {
            rates.push_back(static_cast<double>(pool.size() * iterations * kernel.operations) /
                            seconds_of(pool, kernel, iterations));
        }
        return rates;
    }
    throw std::invalid_argument("no " + type + " peak for ISA " + isa + " on this CPU; see bench_peaks()");
}

}  // namespace

void bind_bench(nb::module_& m) {
    m.def(
        "bench_peaks",
        [] {
            std::vector<std::pair<std::string, std::string>> found;
            for (const PeakKernel& kernel : peak_kernels())
                found.emplace_back(isa_name(kernel.isa), kernel.type);
            return found;
        },
        "(ISA, number type) pairs that bench_peak accepts on this CPU, none above TREADLE_ISA.");
    m.def("bench_peak", &measure_peak, nb::arg("pool"), nb::arg("isa"), nb::arg("type"), nb::arg("seconds"),
          nb::arg("repeats"), nb::call_guard<nb::gil_scoped_release>(),
          "Operations per second (a multiply-add counts as two) of all workers together, once per repeat.");
    m.def("bench_read", &time_reads, nb::arg("pool"), nb::arg("bytes"), nb::arg("passes"),
          nb::call_guard<nb::gil_scoped_release>(),
          "Seconds of each pass of reading `bytes` (rounded up to 1 MiB) of memory with all workers.");
}

}  // namespace treadle
