// The Python module jaxfp8._cuda. It loads where there is neither a driver nor cuBLASLt.
#include <nanobind/stl/string.h>

#include <stdexcept>

#include "common/bindings.h"
#include "cuda/ffi/handlers.h"
#include "cuda/kernels/cublaslt.h"

namespace nb = nanobind;

namespace jaxfp8::cuda {
namespace {

nb::dict Registrations() {
  nb::dict targets;
#define JAXFP8_REGISTER(name) targets[#name] = ToCapsule(name);
  JAXFP8_CUDA_HANDLERS(JAXFP8_REGISTER)
#undef JAXFP8_REGISTER
#define JAXFP8_REGISTER_STAGES(name)                                          \
  {                                                                           \
    nb::dict stages;                                                          \
    stages["initialize"] = ToCapsule(jaxfp8_scaled_matmul_initialize_v1);     \
    stages["execute"] = ToCapsule(name);                                      \
    targets[#name] = stages;                                                  \
  }
  JAXFP8_CUBLASLT_HANDLERS(JAXFP8_REGISTER_STAGES)
#undef JAXFP8_REGISTER_STAGES
  return targets;
}

size_t CublasLtVersion() {
  const nb::gil_scoped_release release;
  const CublasLt& lt = GetCublasLt();
  if (!lt.error.empty()) throw std::runtime_error(lt.error);
  return lt.GetVersion();
}

}  // namespace

NB_MODULE(_cuda, module) {
  module.def("registrations", &Registrations,
             "Return {target name: capsule, or {stage: capsule}} of the custom calls.");
  module.def(
      "architectures", [] { return JAXFP8_ARCHITECTURES; },
      "Return the names of the GPU architectures that the kernels are compiled for, separated by spaces.");
  module.def("cublaslt_version", &CublasLtVersion,
             "Return the version of cuBLASLt; raise a RuntimeError with the reason if it cannot be opened.");
}

}  // namespace jaxfp8::cuda
