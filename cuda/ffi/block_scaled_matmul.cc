// jaxfp8_block_scaled_matmul_v1: a [g, m, k], b [g, n, k], scales of their rows or blocks -> out [g, m, n], workspace.
// Matrices may lack g where it is 1, all or none; scales have it.
#include <optional>
#include <string>
#include <string_view>

#include "cuda/ffi/gemm_checks.h"

namespace jaxfp8::cuda {
namespace {

constexpr char kOp[] = "block_scaled_matmul";

std::optional<ScaleMode> ToScaleMode(std::string_view name) {
  if (name == "rows") return ScaleMode::kRows;
  if (name == "1x32") return ScaleMode::kBlocks1x32;
  if (name == "1x128") return ScaleMode::kBlocks1x128;
  if (name == "128x128") return ScaleMode::kBlocks128x128;
  return std::nullopt;
}

// The scales of a matrix [g, rows, k], in cuBLASLt's layout (kernels/scale_mode.h).
ffi::Error CheckScales(const Operand& scales, ScaleMode mode, const Operand& matrix) {
  const auto [groups, rows, k] = MatrixDims(matrix.buffer);
  const int64_t blocks = CeilDiv(k, 128);
  constexpr ffi::DataType kF32 = ffi::DataType::F32;
  switch (mode) {
    case ScaleMode::kRows: return CheckArray(scales, kF32, {groups, rows});
    case ScaleMode::kBlocks1x32:
      return CheckArray(scales, ffi::DataType::U8, {groups, CeilDiv(rows, 128), blocks, 512});
    case ScaleMode::kBlocks1x128: return CheckArray(scales, kF32, {groups, blocks, rows});
    default: return CheckArray(scales, kF32, {groups, CeilDiv(rows, 128), CeilDiv(blocks, 4) * 4});
  }
}

ffi::Error BlockScaledMatmulHandler(cudaStream_t stream, ffi::AnyBuffer a, ffi::AnyBuffer b, ffi::AnyBuffer a_scale_inv,
                                    ffi::AnyBuffer b_scale_inv, ffi::Result<ffi::AnyBuffer> out,
                                    ffi::Result<ffi::AnyBuffer> workspace, bool precise, std::string_view a_scales,
                                    std::string_view b_scales) {
  const std::optional<ScaleMode> a_mode = ToScaleMode(a_scales);
  const std::optional<ScaleMode> b_mode = ToScaleMode(b_scales);
  if (!a_mode.has_value() || !b_mode.has_value() || !AreMultiplied(*a_mode, *b_mode)) {
    return ffi::Error::InvalidArgument(std::string(kOp) + ": a_scales, b_scales: expected rows by rows, 1x32 by 1x32, " +
                                       "1x128 by 1x128, 1x128 by 128x128 or 128x128 by 1x128, got " +
                                       std::string(a_scales) + " by " + std::string(b_scales));
  }
  const Operand a_operand{kOp, "a", a};
  const Operand b_operand{kOp, "b", b};
  const Operand out_operand{kOp, "out", *out};
  const Operand workspace_operand{kOp, "workspace", *workspace};
  JAXFP8_RETURN_IF_ERROR(CheckFactors(a_operand, b_operand));
  JAXFP8_RETURN_IF_ERROR(CheckProduct(out_operand, workspace_operand, a, b));
  JAXFP8_RETURN_IF_ERROR(CheckScales({kOp, "a_scale_inv", a_scale_inv}, *a_mode, a_operand));
  JAXFP8_RETURN_IF_ERROR(CheckScales({kOp, "b_scale_inv", b_scale_inv}, *b_mode, b_operand));
  JAXFP8_RETURN_IF_ERROR(CheckMultiples(a_operand));
  JAXFP8_RETURN_IF_ERROR(CheckMultiples(b_operand));
  for (const Operand& operand : {a_operand, b_operand, out_operand}) {
    JAXFP8_RETURN_IF_ERROR(CheckPointer(operand));
  }

  ScaledMatmulParams params = ToParams(a, b, a_scale_inv, b_scale_inv, *out, *workspace, precise);
  params.a_scale_stride = ScaleBytes(*a_mode, params.m, params.k);
  params.b_scale_stride = ScaleBytes(*b_mode, params.n, params.k);
  params.a_scales = *a_mode;
  params.b_scales = *b_mode;
  return ToError(kOp, LaunchScaledMatmul(params, stream));
}

}  // namespace
}  // namespace jaxfp8::cuda

// Its initialize stage is that of scaled_matmul.
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_block_scaled_matmul_v1, jaxfp8::cuda::BlockScaledMatmulHandler,
                             jaxfp8::cuda::OnStream()
                                 .Arg<xla::ffi::AnyBuffer>()  // a
                                 .Arg<xla::ffi::AnyBuffer>()  // b
                                 .Arg<xla::ffi::AnyBuffer>()  // a_scale_inv
                                 .Arg<xla::ffi::AnyBuffer>()  // b_scale_inv
                                 .Ret<xla::ffi::AnyBuffer>()  // out
                                 .Ret<xla::ffi::AnyBuffer>()  // workspace
                                 .Attr<bool>("precise")
                                 .Attr<std::string_view>("a_scales")
                                 .Attr<std::string_view>("b_scales"),
                             {jaxfp8::cuda::kRecordable});
