// Included before a handler's source: on the CPU XLA has no stream to give, so the handler gets a null one.
#include <optional>

#include "cuda_runtime_api.h"
#include "xla/ffi/api/ffi.h"

template <>
struct xla::ffi::CtxDecoding<xla::ffi::PlatformStream<cudaStream_t>> {
  using Type = cudaStream_t;
  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*, DiagnosticEngine&) {
    return std::optional<Type>(nullptr);
  }
};
