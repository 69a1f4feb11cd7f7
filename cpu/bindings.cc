// The Python module jaxfp8._cpu.
#include "common/bindings.h"
#include "cpu/ffi/handlers.h"
#include "cpu/kernels/kernel_table.h"

namespace nb = nanobind;

namespace jaxfp8::cpu {
namespace {

nb::dict Registrations() {
  nb::dict targets;
#define JAXFP8_REGISTER(name) targets[#name] = ToCapsule(name);
  JAXFP8_CPU_HANDLERS(JAXFP8_REGISTER)
#undef JAXFP8_REGISTER
  return targets;
}

}  // namespace

NB_MODULE(_cpu, module) {
  module.def("registrations", &Registrations, "Return {target name: capsule} of the custom calls.");
  module.def(
      "instruction_set", [] { return Kernels().isa; },
      "Return the instruction set that the kernels use on this processor.");
}

}  // namespace jaxfp8::cpu
