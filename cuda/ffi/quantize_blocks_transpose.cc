// jaxfp8_quantize_blocks_transpose_v2: x [g, m, n] -> data fp8 [g, m, n], scale_inv for its blocks, amaxes f32 (scratch);
// and, if more results are asked for, data_t [g, n, m] and scale_inv_t for its blocks.
//
// `block`: rows, 1x32, 1x128 or 128x128 of a layout share a scale. `scaling`: f32 or f32_power_2, scales are F32; or
// e8m0_ceil or e8m0_floor, they are U8, the codes of E8M0. Scales lie where block_scaled_matmul reads them
// (kernels/scale_mode.h). The scratch is [g, m], or [g, m + n] with data_t, for rows; else [g, 0].
#include "cuda/kernels/quantize_blocks_transpose.h"

#include <optional>
#include <string_view>

#include "common/ffi/block_checks.h"
#include "cuda/ffi/support.h"
#include "cuda/kernels/scale_mode.h"

namespace jaxfp8::cuda {
namespace {

constexpr char kOp[] = "quantize_blocks_transpose";

std::optional<BlockShape> ToBlockShape(std::string_view name) {
  if (name == "rows") return BlockShape::kRow;
  if (name == "1x32") return BlockShape::k1x32;
  if (name == "1x128") return BlockShape::k1x128;
  if (name == "128x128") return BlockShape::k128x128;
  return std::nullopt;
}

// The codes of a layout [groups, rows, k], and their scales.
ffi::Error CheckLayout(const Operand& data, const Operand& scale_inv, BlockShape block, BlockScaling scaling,
                       ffi::DataType format, int64_t groups, int64_t rows, int64_t k) {
  JAXFP8_RETURN_IF_ERROR(CheckArray(data, format, {groups, rows, k}));
  const int64_t row_tiles = CeilDiv(rows, 128), tiles = CeilDiv(k, 128);
  switch (block) {
    case BlockShape::kRow: return CheckBlockScales(scale_inv, scaling, {groups, rows, k == 0 ? 0 : 1});
    case BlockShape::k1x32: return CheckBlockScales(scale_inv, scaling, {groups, row_tiles, tiles, 512});
    case BlockShape::k1x128: return CheckBlockScales(scale_inv, scaling, {groups, tiles, rows});
    case BlockShape::k128x128: break;
  }
  return CheckBlockScales(scale_inv, scaling, {groups, row_tiles, CeilDiv(tiles, 4) * 4});
}

ffi::Error QuantizeBlocksTransposeHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> data,
                                          ffi::Result<ffi::AnyBuffer> scale_inv, ffi::Result<ffi::AnyBuffer> amaxes,
                                          ffi::RemainingRets rest, std::string_view block, std::string_view scaling) {
  const std::optional<BlockShape> shape = ToBlockShape(block);
  if (!shape.has_value()) return UnknownAttribute(kOp, "block", "rows, 1x32, 1x128 or 128x128", block);
  QuantizeBlocksTransposeParams params = {};
  params.block = *shape;
  JAXFP8_RETURN_IF_ERROR(ToBlockScaling(kOp, scaling, &params.scaling));
  const Operand x_operand{kOp, "x", x};
  const Operand data_operand{kOp, "data", *data};
  JAXFP8_RETURN_IF_ERROR(CheckHighPrecision(x_operand));
  JAXFP8_RETURN_IF_ERROR(CheckInput(x_operand, 3));
  const int64_t groups = params.groups = x.dimensions()[0];
  const int64_t m = params.m = x.dimensions()[1];
  const int64_t n = params.n = x.dimensions()[2];
  JAXFP8_RETURN_IF_ERROR(CheckFp8(data_operand));
  const ffi::DataType format = data->element_type();
  JAXFP8_RETURN_IF_ERROR(
      CheckLayout(data_operand, {kOp, "scale_inv", *scale_inv}, *shape, params.scaling, format, groups, m, n));
  JAXFP8_RETURN_IF_ERROR(CheckTransposedCount(kOp, 3, rest.size()));
  const bool transposes = rest.size() == 2;
  const int64_t lines = *shape == BlockShape::kRow ? m + (transposes ? n : 0) : 0;
  JAXFP8_RETURN_IF_ERROR(CheckArray({kOp, "amaxes", *amaxes}, ffi::DataType::F32, {groups, lines}));
  if (transposes) {
    const ffi::AnyBuffer data_t = **rest.get<ffi::AnyBuffer>(0), scale_inv_t = **rest.get<ffi::AnyBuffer>(1);
    JAXFP8_RETURN_IF_ERROR(CheckLayout({kOp, "data_t", data_t}, {kOp, "scale_inv_t", scale_inv_t}, *shape,
                                       params.scaling, format, groups, n, m));
    params.data_t = data_t.untyped_data();
    params.scale_inv_t = scale_inv_t.untyped_data();
  }
  params.dtype = ToDtype(x.element_type());
  params.format = ToDtype(format);
  params.x = x.untyped_data();
  params.data = data->untyped_data();
  params.scale_inv = scale_inv->untyped_data();
  params.amaxes = Data<float>(*amaxes);
  return ToError(kOp, LaunchQuantizeBlocksTranspose(params, stream));
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize_blocks_transpose_v2, jaxfp8::cuda::QuantizeBlocksTransposeHandler,
                             jaxfp8::cuda::OnStream()
                                 .Arg<xla::ffi::AnyBuffer>()  // x
                                 .Ret<xla::ffi::AnyBuffer>()  // data
                                 .Ret<xla::ffi::AnyBuffer>()  // scale_inv
                                 .Ret<xla::ffi::AnyBuffer>()  // amaxes
                                 .RemainingRets()             // data_t, scale_inv_t
                                 .Attr<std::string_view>("block")
                                 .Attr<std::string_view>("scaling"),
                             {jaxfp8::cuda::kRecordable});
