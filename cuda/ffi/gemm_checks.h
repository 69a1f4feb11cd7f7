// What the handlers of cuBLASLt's products check of their matrices.
#ifndef JAXFP8_CUDA_FFI_GEMM_CHECKS_H_
#define JAXFP8_CUDA_FFI_GEMM_CHECKS_H_

#include <cstdint>

#include "common/checks.h"

namespace jaxfp8::cuda {

// cuBLASLt's FP8 kernels move 16 bytes at a time. Python pads before it calls.
constexpr int64_t kGemmMultiple = 16;

// a [g, m, k] and b [g, n, k].
inline ffi::Error CheckFactors(const Operand& a, const Operand& b) {
  for (const Operand& matrix : {a, b}) {
    JAXFP8_RETURN_IF_ERROR(CheckFp8(matrix));
    JAXFP8_RETURN_IF_ERROR(CheckInput(matrix, 3));
  }
  const ffi::Span<const int64_t> dims = a.buffer.dimensions();
  JAXFP8_RETURN_IF_ERROR(CheckShape(b, {dims[0], b.buffer.dimensions()[1], dims[2]}));
  if (a.buffer.element_type() != ffi::DataType::F8E5M2) return ffi::Error::Success();
  return CheckDtype(b, {ffi::DataType::F8E4M3FN});  // no tensor core multiplies two e5m2
}

// out [g, m, n] and the workspace.
inline ffi::Error CheckProduct(const Operand& out, const Operand& workspace, int64_t groups, int64_t m, int64_t n) {
  JAXFP8_RETURN_IF_ERROR(CheckHighPrecision(out));
  JAXFP8_RETURN_IF_ERROR(CheckInput(out, 3));
  JAXFP8_RETURN_IF_ERROR(CheckShape(out, {groups, m, n}));
  JAXFP8_RETURN_IF_ERROR(CheckDtype(workspace, {ffi::DataType::U8}));
  return CheckRank(workspace, 1);
}

inline ffi::Error CheckMultiples(const Operand& matrix) {
  const ffi::Span<const int64_t> dims = matrix.buffer.dimensions();
  if (dims[1] % kGemmMultiple == 0 && dims[2] % kGemmMultiple == 0) return ffi::Error::Success();
  return Mismatch(matrix, "sizes that are multiples of 16");
}

inline ffi::Error CheckPointer(const Operand& operand) {
  if (reinterpret_cast<uintptr_t>(operand.buffer.untyped_data()) % kGemmMultiple == 0) return ffi::Error::Success();
  return Mismatch(operand, "a pointer that is a multiple of 16 bytes");
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_FFI_GEMM_CHECKS_H_
