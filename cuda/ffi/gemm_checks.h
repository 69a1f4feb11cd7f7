// What the handlers of cuBLASLt's products share: checks of their matrices, and the product they describe.
#ifndef JAXFP8_CUDA_FFI_GEMM_CHECKS_H_
#define JAXFP8_CUDA_FFI_GEMM_CHECKS_H_

#include <cstdint>

#include "common/ffi/checks.h"
#include "cuda/ffi/support.h"
#include "cuda/kernels/scaled_matmul.h"

namespace jaxfp8::cuda {

// cuBLASLt's FP8 kernels move 16 bytes at a time. Python pads before it calls.
constexpr int64_t kGemmMultiple = 16;

// a [g, m, k] and b [g, n, k], which may both lack g.
inline ffi::Error CheckFactors(const Operand& a, const Operand& b) {
  for (const Operand& matrix : {a, b}) {
    JAXFP8_RETURN_IF_ERROR(CheckFp8(matrix));
    JAXFP8_RETURN_IF_ERROR(CheckMatrices(matrix));
  }
  JAXFP8_RETURN_IF_ERROR(CheckShapeLike(b, a.buffer, MatrixDims(b.buffer)[1], MatrixDims(a.buffer)[2]));
  if (a.buffer.element_type() != ffi::DataType::F8E5M2) return ffi::Error::Success();
  return CheckDtype(b, {ffi::DataType::F8E4M3FN});  // no tensor core multiplies two e5m2
}

// out [g, m, n], which lacks g where a does, and the workspace.
inline ffi::Error CheckProduct(const Operand& out, const Operand& workspace, ffi::AnyBuffer a, ffi::AnyBuffer b) {
  JAXFP8_RETURN_IF_ERROR(CheckHighPrecision(out));
  JAXFP8_RETURN_IF_ERROR(CheckMatrices(out));
  JAXFP8_RETURN_IF_ERROR(CheckShapeLike(out, a, MatrixDims(a)[1], MatrixDims(b)[1]));
  JAXFP8_RETURN_IF_ERROR(CheckDtype(workspace, {ffi::DataType::U8}));
  return CheckRank(workspace, 1);
}

inline ffi::Error CheckMultiples(const Operand& matrix) {
  const auto [groups, rows, k] = MatrixDims(matrix.buffer);
  if (rows % kGemmMultiple == 0 && k % kGemmMultiple == 0) return ffi::Error::Success();
  return Mismatch(matrix, "sizes that are multiples of 16");
}

inline ffi::Error CheckPointer(const Operand& operand) {
  if (reinterpret_cast<uintptr_t>(operand.buffer.untyped_data()) % kGemmMultiple == 0) return ffi::Error::Success();
  return Mismatch(operand, "a pointer that is a multiple of 16 bytes");
}

// cuBLASLt reads scales at multiples of 16 bytes: f32 [1] is one for all groups; the first of each four of [s, 4] one for
// groups / s groups in a row.
inline ffi::Error CheckSpacedScale(const Operand& scale, int64_t groups) {
  const ffi::Span<const int64_t> dims = scale.buffer.dimensions();
  const bool is_one = dims.size() == 1 && dims[0] == 1;
  const bool are_spaced = dims.size() == 2 && dims[1] == 4 && (dims[0] > 0 ? groups % dims[0] == 0 : groups == 0);
  if (scale.buffer.element_type() == ffi::DataType::F32 && (is_one || are_spaced)) return ffi::Error::Success();
  std::string expected = "F32[1]";
  if (groups != 1) expected += " or F32[s,4] where s divides " + std::to_string(groups);
  return Mismatch(scale, expected);
}

// How many scales are in a buffer that has passed CheckSpacedScale.
inline int64_t CountScales(ffi::AnyBuffer scale) { return scale.dimensions()[0]; }

// The product of checked buffers; how scales lie, a bias and an accumulator are for the handler to add.
inline ScaledMatmulParams ToParams(const ffi::AnyBuffer& a, const ffi::AnyBuffer& b, const ffi::AnyBuffer& a_scale_inv,
                                   const ffi::AnyBuffer& b_scale_inv, const ffi::AnyBuffer& out,
                                   const ffi::AnyBuffer& workspace, bool precise) {
  ScaledMatmulParams params = {};
  params.a_dtype = ToDtype(a.element_type());
  params.b_dtype = ToDtype(b.element_type());
  params.out_dtype = ToDtype(out.element_type());
  params.a = a.untyped_data();
  params.b = b.untyped_data();
  params.a_scale_inv = a_scale_inv.untyped_data();
  params.b_scale_inv = b_scale_inv.untyped_data();
  params.out = out.untyped_data();
  params.workspace = workspace.untyped_data();
  params.workspace_bytes = workspace.dimensions()[0];
  const auto [groups, m, k] = MatrixDims(a);
  params.groups = groups;
  params.batch = 1;
  params.m = m;
  params.n = MatrixDims(b)[1];
  params.k = k;
  params.precise = precise;
  return params;
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_FFI_GEMM_CHECKS_H_
