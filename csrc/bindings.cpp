// The Python module treadle._native: one bind function per folder, in the order in which types depend on each
// other.
#include <nanobind/nanobind.h>

namespace nb = nanobind;

namespace treadle {

void bind_bench(nb::module_& m);
void bind_gguf(nb::module_& m);
void bind_kernels(nb::module_& m);
void bind_program(nb::module_& m);
void bind_sampling(nb::module_& m);
void bind_threads(nb::module_& m);

}  // namespace treadle

NB_MODULE(_native, m) {
    m.doc() = "The native core of Treadle. Its typed face is _native.pyi.";
    treadle::bind_threads(m);
    treadle::bind_gguf(m);
    treadle::bind_program(m);
    treadle::bind_kernels(m);
    treadle::bind_sampling(m);
    treadle::bind_bench(m);
}
