// What both modules tell Python: their handlers.
#ifndef JAXFP8_COMMON_BINDINGS_H_
#define JAXFP8_COMMON_BINDINGS_H_

#include <nanobind/nanobind.h>

#include "xla/ffi/api/c_api.h"

namespace jaxfp8 {

// A handler as jax.ffi.register_ffi_target takes it.
inline nanobind::capsule ToCapsule(XLA_FFI_Handler* handler) {
  return nanobind::capsule(reinterpret_cast<void*>(handler));
}

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_BINDINGS_H_
