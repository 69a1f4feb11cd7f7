// jaxfp8_quantize_activation_v2: x [g, m, 1 or 2, n], scale f32 [1] or [g], amax_so_far f32 [g] or [0] -> data fp8
// [g, m, n], amax f32 [g] or [0], and, if there is a third result, data_t [g, n, m].
#include "cuda/kernels/quantize_activation.h"

#include <optional>
#include <string>
#include <string_view>

#include "cuda/ffi/tiles.h"

namespace jaxfp8::cuda {
namespace {

constexpr const char* kOp = "quantize_activation";

std::optional<Activation> ToActivation(std::string_view name) {
  if (name == "gelu") return Activation::kGelu;
  if (name == "silu") return Activation::kSilu;
  if (name == "relu") return Activation::kRelu;
  if (name == "silu_gated") return Activation::kSiluGated;
  if (name == "gelu_gated") return Activation::kGeluGated;
  return std::nullopt;
}

ffi::Error QuantizeActivationHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                                     ffi::AnyBuffer amax_so_far, ffi::Result<ffi::AnyBuffer> data,
                                     ffi::Result<ffi::AnyBuffer> amax, ffi::RemainingRets rest,
                                     std::string_view activation) {
  const std::optional<Activation> function = ToActivation(activation);
  if (!function.has_value()) {
    return ffi::Error::InvalidArgument(std::string(kOp) + ": activation: expected gelu, silu, relu, silu_gated or " +
                                       "gelu_gated, got " + std::string(activation));
  }
  const bool gated = *function == Activation::kSiluGated || *function == Activation::kGeluGated;
  const Operand x_operand{kOp, "x", x};
  JAXFP8_RETURN_IF_ERROR(CheckHighPrecision(x_operand));
  JAXFP8_RETURN_IF_ERROR(CheckInput(x_operand, 4));
  JAXFP8_RETURN_IF_ERROR(CheckShape(x_operand, {x.dimensions()[0], x.dimensions()[1], gated ? 2 : 1,
                                                x.dimensions()[3]}));
  QuantizeActivationParams params = {};
  JAXFP8_RETURN_IF_ERROR(CheckTiles(kOp, x, scale, amax_so_far, *data, *amax, rest, &params));
  params.activation = *function;
  return ToError(kOp, LaunchQuantizeActivation(params, stream));
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize_activation_v2, jaxfp8::cuda::QuantizeActivationHandler,
                             xla::ffi::Ffi::Bind()
                                 .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                 .Arg<xla::ffi::AnyBuffer>()  // x
                                 .Arg<xla::ffi::AnyBuffer>()  // scale
                                 .Arg<xla::ffi::AnyBuffer>()  // amax_so_far
                                 .Ret<xla::ffi::AnyBuffer>()  // data
                                 .Ret<xla::ffi::AnyBuffer>()  // amax
                                 .RemainingRets()             // data_t
                                 .Attr<std::string_view>("activation"),
                             {jaxfp8::cuda::kRecordable});
