// What every handler needs: dtypes in the launchers' terms, CUDA errors as FFI errors, and exported symbols.
#ifndef JAXFP8_CUDA_FFI_SUPPORT_H_
#define JAXFP8_CUDA_FFI_SUPPORT_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "common/checks.h"
#include "common/dispatch.h"
#include "xla/ffi/api/ffi.h"

// Before XLA_FFI_DEFINE_HANDLER_SYMBOL(name, ...): everything else in the library is hidden.
#define JAXFP8_EXPORT_HANDLER(name) \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* name(XLA_FFI_CallFrame* call_frame)

namespace jaxfp8::cuda {

// Every handler has this trait: it touches its buffers and the stream it is given and nothing else, so that XLA may
// record it into CUDA graphs.
constexpr ffi::Traits kRecordable = ffi::Traits::kCmdBufferCompatible;

// Of a dtype that has passed CheckHighPrecision or CheckFp8.
inline Dtype ToDtype(ffi::DataType dtype) {
  switch (dtype) {
    case ffi::DataType::BF16: return Dtype::kBF16;
    case ffi::DataType::F16: return Dtype::kF16;
    case ffi::DataType::F8E4M3FN: return Dtype::kE4M3;
    case ffi::DataType::F8E5M2: return Dtype::kE5M2;
    default: return Dtype::kF32;
  }
}

// From one group's scale to the next, in a buffer that has passed CheckScale.
inline int64_t ScaleStride(ffi::AnyBuffer scale) { return scale.dimensions()[0] == 1 ? 0 : 1; }

// A result that is f32[groups].
inline ffi::Error CheckAmax(const Operand& amax, int64_t groups) {
  JAXFP8_RETURN_IF_ERROR(CheckDtype(amax, {ffi::DataType::F32}));
  return CheckShape(amax, {groups});
}

// x: of `rank`, and small enough that neither it nor a result of the same shape overflows 64 bits.
inline ffi::Error CheckInput(const Operand& x, size_t rank) {
  JAXFP8_RETURN_IF_ERROR(CheckRank(x, rank));
  return CheckSize(x, sizeof(float));
}

inline ffi::Error ToError(const char* op, cudaError_t status) {
  if (status == cudaSuccess) return ffi::Error::Success();
  return ffi::Error::Internal(std::string(op) + ": CUDA: " + cudaGetErrorName(status) + ": " +
                              cudaGetErrorString(status));
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_FFI_SUPPORT_H_
