#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>
#include <sched.h>

#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "threads/pool.h"

namespace nb = nanobind;

namespace treadle {

namespace {

// The first `count` of the CPUs that this process may use.
std::vector<int> first_allowed(int count) {
    cpu_set_t allowed;
    if (sched_getaffinity(0, sizeof allowed, &allowed) != 0)
        throw std::runtime_error(
            "the CPU affinity of this process cannot be read; name the CPUs of the pool");
    std::vector<int> cpus;
    for (int cpu = 0; cpu < CPU_SETSIZE && static_cast<int>(cpus.size()) < count; ++cpu)
        if (CPU_ISSET(cpu, &allowed)) cpus.push_back(cpu);
    if (static_cast<int>(cpus.size()) < count)
        throw std::invalid_argument("a pool of " + std::to_string(count) +
                                    " threads was asked for, but this process may use " +
                                    std::to_string(cpus.size()) + " CPUs");
    return cpus;
}

void init_pool(Pool* self, int threads, const std::optional<std::vector<int>>& cpus, bool pinned) {
    if (threads < 1)
        throw std::invalid_argument("a pool needs at least 1 thread, not " + std::to_string(threads));
    if (cpus && static_cast<int>(cpus->size()) != threads)
        throw std::invalid_argument(std::to_string(threads) + " threads need as many CPUs, but " +
                                    std::to_string(cpus->size()) + " were named");
    new (self) Pool(cpus ? *cpus : first_allowed(threads), pinned);
}

}  // namespace

void bind_threads(nb::module_& m) {
    nb::class_<Pool>(m, "Pool", "Worker threads that native calls share. Idle ones use no CPU.")
        .def("__init__", &init_pool, nb::arg("threads"), nb::arg("cpus") = nb::none(),
             nb::arg("pinned") = true,
             "`cpus`: one logical CPU id per thread; None takes the first ones that this process may use. "
             "Unless `pinned` to one CPU each, the system may move them among these. ValueError names what "
             "does "
             "not fit.")
        .def_prop_ro("threads", &Pool::size, "Number of workers, the calling thread included.")
        .def_prop_rw("active", &Pool::active, &Pool::set_active,
                     "How many workers take part in calls, 1 to `threads`; counts from the next call on.")
        .def_prop_ro("working", &Pool::working,
                     "How many took part in the last call: those on CPUs that other processes keep busy are "
                     "left out of small steps.");
    nb::class_<Crowding>(m, "Crowding", "Which CPUs other processes keep busy; a face for tests.")
        .def(nb::init<int>(), nb::arg("places"))
        .def("observe", &Crowding::observe, nb::arg("now"), nb::arg("job"), nb::arg("places"),
             nb::arg("delays"))
        .def("uncrowded", &Crowding::uncrowded, nb::arg("now"), nb::arg("active"));
}

}  // namespace treadle
