// jaxfp8_scaled_matmul_v2: a [g, m, k], b [g, n, k], their scale_invs, bias, accumulator -> out [g, m, n], workspace.
// Matrices may lack g where it is 1, all or none.
#include <algorithm>

#include "cuda/ffi/gemm_checks.h"

namespace jaxfp8::cuda {
namespace {

constexpr char kOp[] = "scaled_matmul";
constexpr int64_t kScaleBytes = 4 * sizeof(float);  // from one scale to the next

// Scales of both operands are for the same groups where both have several.
ffi::Error CheckScales(const Operand& a_scale_inv, const Operand& b_scale_inv, int64_t groups) {
  JAXFP8_RETURN_IF_ERROR(CheckSpacedScale(a_scale_inv, groups));
  JAXFP8_RETURN_IF_ERROR(CheckSpacedScale(b_scale_inv, groups));
  const int64_t a_scales = CountScales(a_scale_inv.buffer), b_scales = CountScales(b_scale_inv.buffer);
  if (a_scales == 1 || b_scales == 1 || a_scales == b_scales) return ffi::Error::Success();
  return Mismatch(b_scale_inv, "F32[1] or F32[" + std::to_string(a_scales) + ",4]");
}

ffi::Error CheckOperandCount(const ffi::RemainingArgs& rest, bool has_bias, bool has_accumulator) {
  const size_t expected = size_t{has_bias} + size_t{has_accumulator};
  if (rest.size() == expected) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(std::string(kOp) + ": expected " + std::to_string(4 + expected) +
                                     " operands with these attributes, got " + std::to_string(4 + rest.size()));
}

// cuBLASLt adds a bias of the output's type, and bf16 to f32.
ffi::Error CheckBias(const Operand& bias, ffi::DataType out, int64_t n) {
  const ffi::DataType dtype = out == ffi::DataType::F16 ? ffi::DataType::F16 : ffi::DataType::BF16;
  JAXFP8_RETURN_IF_ERROR(CheckArray(bias, dtype, {n}));
  return CheckPointer(bias);
}

// cuBLASLt's C has the type of D.
ffi::Error CheckAccumulator(const Operand& accumulator, const Operand& out) {
  JAXFP8_RETURN_IF_ERROR(CheckArray(accumulator, ffi::DataType::F32, out.buffer.dimensions()));
  if (out.buffer.element_type() != ffi::DataType::F32) return Mismatch(out, "F32 with an accumulator");
  return CheckPointer(accumulator);
}

ffi::Error ScaledMatmulHandler(cudaStream_t stream, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer a_scale_inv,
                               ffi::AnyBuffer b_scale_inv, ffi::RemainingArgs rest, ffi::Result<ffi::AnyBuffer> out,
                               ffi::Result<ffi::AnyBuffer> workspace, bool precise, bool has_bias,
                               bool has_accumulator) {
  const Operand a_operand{kOp, "a", a};
  const Operand b_operand{kOp, "b", b};
  const Operand out_operand{kOp, "out", *out};
  const Operand workspace_operand{kOp, "workspace", *workspace};
  JAXFP8_RETURN_IF_ERROR(CheckFactors(a_operand, b_operand));
  const auto [groups, m, k] = MatrixDims(a);
  const int64_t n = MatrixDims(b)[1];
  JAXFP8_RETURN_IF_ERROR(CheckScales({kOp, "a_scale_inv", a_scale_inv}, {kOp, "b_scale_inv", b_scale_inv}, groups));
  JAXFP8_RETURN_IF_ERROR(CheckProduct(out_operand, workspace_operand, a, b));
  JAXFP8_RETURN_IF_ERROR(CheckOperandCount(rest, has_bias, has_accumulator));

  ScaledMatmulParams params = ToParams(a, b, a_scale_inv, b_scale_inv, *out, *workspace, precise);
  if (has_bias) {
    const ffi::AnyBuffer bias = *rest.get<ffi::AnyBuffer>(0);
    JAXFP8_RETURN_IF_ERROR(CheckBias({kOp, "bias", bias}, out->element_type(), n));
    params.bias = bias.untyped_data();
  }
  if (has_accumulator) {
    const ffi::AnyBuffer accumulator = *rest.get<ffi::AnyBuffer>(has_bias ? 1 : 0);
    JAXFP8_RETURN_IF_ERROR(CheckAccumulator({kOp, "accumulator", accumulator}, out_operand));
    params.accumulator = Data<float>(accumulator);
  }
  JAXFP8_RETURN_IF_ERROR(CheckMultiples(a_operand));
  JAXFP8_RETURN_IF_ERROR(CheckMultiples(b_operand));
  for (const Operand& operand : {a_operand, b_operand, out_operand}) {
    JAXFP8_RETURN_IF_ERROR(CheckPointer(operand));
  }
  // Python computes empty products itself. Without extras they are zeros, which need no GEMM.
  if (k == 0 && (has_bias || has_accumulator)) return Mismatch(a_operand, "k of at least 16 with these attributes");

  const int64_t a_scales = CountScales(a_scale_inv), b_scales = CountScales(b_scale_inv);
  params.batch = groups / std::max<int64_t>({1, a_scales, b_scales});
  params.a_scale_stride = a_scales == 1 ? 0 : kScaleBytes;
  params.b_scale_stride = b_scales == 1 ? 0 : kScaleBytes;
  return ToError(kOp, LaunchScaledMatmul(params, stream));
}

// XLA calls this before each run or recording of a program, with the program's device current. It looks at no buffer.
ffi::Error InitializeScaledMatmul() {
  return ToError(kOp, PrepareScaledMatmul());
}

}  // namespace
}  // namespace jaxfp8::cuda

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp8_scaled_matmul_initialize_v1, jaxfp8::cuda::InitializeScaledMatmul,
                              xla::ffi::Ffi::BindInitialize(), {jaxfp8::cuda::kRecordable});

JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_scaled_matmul_v2, jaxfp8::cuda::ScaledMatmulHandler,
                             jaxfp8::cuda::OnStream()
                                 .Arg<xla::ffi::AnyBuffer>()  // a
                                 .Arg<xla::ffi::AnyBuffer>()  // b
                                 .Arg<xla::ffi::AnyBuffer>()  // a_scale_inv
                                 .Arg<xla::ffi::AnyBuffer>()  // b_scale_inv
                                 .RemainingArgs()             // bias, accumulator
                                 .Ret<xla::ffi::AnyBuffer>()  // out
                                 .Ret<xla::ffi::AnyBuffer>()  // workspace
                                 .Attr<bool>("precise")
                                 .Attr<bool>("has_bias")
                                 .Attr<bool>("has_accumulator"),
                             {jaxfp8::cuda::kRecordable});
