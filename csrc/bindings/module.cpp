#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include "launch.h"

#ifndef FAR_CUDA_VERSION
#define FAR_CUDA_VERSION ""
#define FAR_CUDA_ARCHS ""
#endif

namespace nb = nanobind;

void bind_adam(nb::module_& m);
void bind_quantise(nb::module_& m);
void bind_tvl1(nb::module_& m);

NB_MODULE(_ext, m) {
  nb::set_leak_warnings(false);  // an optimizer that lives until the interpreter ends is no leak
  m.doc() = "Compiled operations of fastactrec; call them through fastactrec.ops.";
  m.def("build_info", [] {
    nb::dict info;
    info["version"] = FAR_VERSION;
    info["source_hash"] = FAR_SOURCE_HASH;
    info["compiler"] = FAR_COMPILER;
    info["isas"] = FAR_ISA_LIST;
    info["isa"] = far::cpu::isa_name();
#ifdef FAR_WITH_CUDA
    info["cuda"] = true;
#else
    info["cuda"] = false;
#endif
    info["cuda_version"] = FAR_CUDA_VERSION;
    info["cuda_archs"] = FAR_CUDA_ARCHS;
    return info;
  });
  bind_adam(m);
  bind_quantise(m);
  bind_tvl1(m);
}
