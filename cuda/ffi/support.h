// What every handler needs: its trait, and CUDA errors as FFI errors.
#ifndef JAXFP8_CUDA_FFI_SUPPORT_H_
#define JAXFP8_CUDA_FFI_SUPPORT_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "common/ffi/checks.h"
#include "xla/ffi/api/ffi.h"

namespace jaxfp8::cuda {

// Every handler has this trait: it touches its buffers and the stream it is given and nothing else, so that XLA may
// record it into CUDA graphs.
constexpr ffi::Traits kRecordable = ffi::Traits::kCmdBufferCompatible;

// What every binding begins with.
inline auto OnStream() { return ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>(); }

inline ffi::Error ToError(const char* op, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(op) + ": CUDA: " + cudaGetErrorName(status) + ": " +
                              cudaGetErrorString(status));
}

// `error` is empty for success.
inline ffi::Error ToError(const char* op, const std::string& error) {
  return error.empty() ? ffi::Error::Success() : ffi::Error::Internal(std::string(op) + ": " + error);
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_FFI_SUPPORT_H_
