// jaxfp8_quantize_blocks_transpose_v2: x [g, m, n] -> data fp8 [g, m, n], scale_inv for its blocks, amaxes f32 (scratch);
// and, if more results are asked for, data_t [g, n, m] and scale_inv_t for its blocks.
//
// `block`: rows, 1x32, 1x128 or 128x128 of a layout share a scale. `scaling`: f32 or f32_power_2, scales are F32; or
// e8m0_ceil or e8m0_floor, they are U8, the codes of E8M0. Scales lie where block_scaled_matmul reads them
// (kernels/scale_mode.h). The scratch is [g, m], or [g, m + n] with data_t, for rows; else [g, 0].
#include "cuda/kernels/quantize_blocks_transpose.h"

#include <optional>
#include <string>
#include <string_view>

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

std::optional<BlockScaling> ToBlockScaling(std::string_view name) {
  if (name == "f32") return BlockScaling::kF32;
  if (name == "f32_power_2") return BlockScaling::kF32PowerOf2;
  if (name == "e8m0_ceil") return BlockScaling::kE8M0Ceil;
  if (name == "e8m0_floor") return BlockScaling::kE8M0Floor;
  return std::nullopt;
}

ffi::Error UnknownAttribute(const char* name, const char* expected, std::string_view got) {
  return ffi::Error::InvalidArgument(std::string(kOp) + ": " + name + ": expected " + expected + ", got " +
                                     std::string(got));
}

// The codes of a layout [groups, rows, k], and their scales.
ffi::Error CheckLayout(const Operand& data, const Operand& scale_inv, BlockShape block, BlockScaling scaling,
                       ffi::DataType format, int64_t groups, int64_t rows, int64_t k) {
  JAXFP8_RETURN_IF_ERROR(CheckDtype(data, {format}));
  JAXFP8_RETURN_IF_ERROR(CheckShape(data, {groups, rows, k}));
  JAXFP8_RETURN_IF_ERROR(CheckDtype(scale_inv, {IsE8M0(scaling) ? ffi::DataType::U8 : ffi::DataType::F32}));
  const int64_t row_tiles = CeilDiv(rows, 128), tiles = CeilDiv(k, 128);
  switch (block) {
    case BlockShape::kRow: return CheckShape(scale_inv, {groups, rows, k == 0 ? 0 : 1});
    case BlockShape::k1x32: return CheckShape(scale_inv, {groups, row_tiles, tiles, 512});
    case BlockShape::k1x128: return CheckShape(scale_inv, {groups, tiles, rows});
    case BlockShape::k128x128: break;
  }
  return CheckShape(scale_inv, {groups, row_tiles, CeilDiv(tiles, 4) * 4});
}

ffi::Error QuantizeBlocksTransposeHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> data,
                                          ffi::Result<ffi::AnyBuffer> scale_inv, ffi::Result<ffi::AnyBuffer> amaxes,
                                          ffi::RemainingRets rest, std::string_view block, std::string_view scaling) {
  const std::optional<BlockShape> shape = ToBlockShape(block);
  if (!shape.has_value()) return UnknownAttribute("block", "rows, 1x32, 1x128 or 128x128", block);
  const std::optional<BlockScaling> kind = ToBlockScaling(scaling);
  if (!kind.has_value()) {
    return UnknownAttribute("scaling", "f32, f32_power_2, e8m0_ceil or e8m0_floor", scaling);
  }
  const Operand x_operand{kOp, "x", x};
  const Operand data_operand{kOp, "data", *data};
  const Operand amaxes_operand{kOp, "amaxes", *amaxes};
  JAXFP8_RETURN_IF_ERROR(CheckHighPrecision(x_operand));
  JAXFP8_RETURN_IF_ERROR(CheckInput(x_operand, 3));
  const int64_t groups = x.dimensions()[0];
  const int64_t m = x.dimensions()[1];
  const int64_t n = x.dimensions()[2];
  JAXFP8_RETURN_IF_ERROR(CheckFp8(data_operand));
  const ffi::DataType format = data->element_type();
  JAXFP8_RETURN_IF_ERROR(
      CheckLayout(data_operand, {kOp, "scale_inv", *scale_inv}, *shape, *kind, format, groups, m, n));
  if (rest.size() != 0 && rest.size() != 2) {
    return ffi::Error::InvalidArgument(std::string(kOp) + ": expected 3 or 5 results, got " +
                                       std::to_string(3 + rest.size()));
  }
  const bool transposes = rest.size() == 2;
  const int64_t lines = *shape == BlockShape::kRow ? m + (transposes ? n : 0) : 0;
  JAXFP8_RETURN_IF_ERROR(CheckDtype(amaxes_operand, {ffi::DataType::F32}));
  JAXFP8_RETURN_IF_ERROR(CheckShape(amaxes_operand, {groups, lines}));

  QuantizeBlocksTransposeParams params = {};
  if (transposes) {
    auto data_t = rest.get<ffi::AnyBuffer>(0);
    auto scale_inv_t = rest.get<ffi::AnyBuffer>(1);
    if (!data_t.has_value()) return data_t.error();
    if (!scale_inv_t.has_value()) return scale_inv_t.error();
    JAXFP8_RETURN_IF_ERROR(CheckLayout({kOp, "data_t", **data_t}, {kOp, "scale_inv_t", **scale_inv_t}, *shape, *kind,
                                       format, groups, n, m));
    params.data_t = (*data_t)->untyped_data();
    params.scale_inv_t = (*scale_inv_t)->untyped_data();
  }
  params.dtype = ToDtype(x.element_type());
  params.format = ToDtype(format);
  params.block = *shape;
  params.scaling = *kind;
  params.x = x.untyped_data();
  params.data = data->untyped_data();
  params.scale_inv = scale_inv->untyped_data();
  params.amaxes = Data<float>(*amaxes);
  params.groups = groups;
  params.m = m;
  params.n = n;
  return ToError(kOp, LaunchQuantizeBlocksTranspose(params, stream));
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize_blocks_transpose_v2, jaxfp8::cuda::QuantizeBlocksTransposeHandler,
                             xla::ffi::Ffi::Bind()
                                 .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                 .Arg<xla::ffi::AnyBuffer>()  // x
                                 .Ret<xla::ffi::AnyBuffer>()  // data
                                 .Ret<xla::ffi::AnyBuffer>()  // scale_inv
                                 .Ret<xla::ffi::AnyBuffer>()  // amaxes
                                 .RemainingRets()             // data_t, scale_inv_t
                                 .Attr<std::string_view>("block")
                                 .Attr<std::string_view>("scaling"),
                             {jaxfp8::cuda::kRecordable});
