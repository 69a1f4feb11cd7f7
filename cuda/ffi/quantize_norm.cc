// jaxfp8_quantize_norm_v1: x [g, m, n], scale f32 [1] or [g], amax f32 [g], gamma f32 [1, n] or [g, n], and, if
// has_beta, beta as gamma -> data fp8 [g, m, n], amax f32 [g], and, if there is a third result, data_t [g, n, m].
#include "cuda/kernels/quantize_norm.h"

#include <sstream>
#include <string>
#include <string_view>

#include "cuda/ffi/codes.h"

namespace jaxfp8::cuda {
namespace {

constexpr const char* kOp = "quantize_norm";

ffi::Error CheckParameters(const Operand& operand, int64_t groups, int64_t n) {
  JAXFP8_RETURN_IF_ERROR(CheckDtype(operand, {ffi::DataType::F32}));
  JAXFP8_RETURN_IF_ERROR(CheckRank(operand, 2));
  const int64_t rows = operand.buffer.dimensions()[0];
  return CheckShape(operand, {rows == 1 ? 1 : groups, n});
}

ffi::Error CheckEpsilon(float epsilon) {
  if (epsilon >= 0.0f && FloatToBits(epsilon) < kInfBits) return ffi::Error::Success();
  std::ostringstream got;
  got << epsilon;
  return ffi::Error::InvalidArgument(std::string(kOp) + ": epsilon: expected a finite F32 of at least 0, got " +
                                     got.str());
}

ffi::Error QuantizeNormHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer amax_so_far,
                               ffi::AnyBuffer gamma, ffi::RemainingArgs more, ffi::Result<ffi::AnyBuffer> data,
                               ffi::Result<ffi::AnyBuffer> amax, ffi::RemainingRets rest, std::string_view kind,
                               float epsilon, bool has_beta) {
  if (kind != "rms" && kind != "layer") {
    return ffi::Error::InvalidArgument(std::string(kOp) + ": kind: expected rms or layer, got " + std::string(kind));
  }
  JAXFP8_RETURN_IF_ERROR(CheckEpsilon(epsilon));
  const Operand x_operand{kOp, "x", x};
  JAXFP8_RETURN_IF_ERROR(CheckHighPrecision(x_operand));
  JAXFP8_RETURN_IF_ERROR(CheckInput(x_operand, 3));
  const int64_t groups = x.dimensions()[0];
  const int64_t m = x.dimensions()[1];
  const int64_t n = x.dimensions()[2];
  JAXFP8_RETURN_IF_ERROR(CheckScale({kOp, "scale", scale}, groups));
  JAXFP8_RETURN_IF_ERROR(CheckAmax({kOp, "amax_so_far", amax_so_far}, groups));
  JAXFP8_RETURN_IF_ERROR(CheckParameters({kOp, "gamma", gamma}, groups, n));
  if (more.size() != size_t{has_beta}) {
    return ffi::Error::InvalidArgument(std::string(kOp) + ": expected " + std::to_string(4 + has_beta) +
                                       " operands with these attributes, got " + std::to_string(4 + more.size()));
  }
  QuantizeNormParams params = {};
  if (has_beta) {
    const auto beta = more.get<ffi::AnyBuffer>(0);
    if (!beta.has_value()) return beta.error();
    const Operand beta_operand{kOp, "beta", *beta};
    JAXFP8_RETURN_IF_ERROR(CheckDtype(beta_operand, {ffi::DataType::F32}));
    JAXFP8_RETURN_IF_ERROR(CheckShape(beta_operand, gamma.dimensions()));
    params.beta = static_cast<const float*>(beta->untyped_data());
  }
  Codes codes;
  JAXFP8_RETURN_IF_ERROR(CheckCodes(kOp, *data, *amax, rest, groups, m, n, &codes));

  params.dtype = ToDtype(x.element_type());
  params.format = ToDtype(data->element_type());
  params.centered = kind == "layer";
  params.epsilon = epsilon;
  params.x = x.untyped_data();
  params.scale = static_cast<const float*>(scale.untyped_data());
  params.scale_stride = ScaleStride(scale);
  params.amax_so_far = static_cast<const float*>(amax_so_far.untyped_data());
  params.gamma = static_cast<const float*>(gamma.untyped_data());
  params.parameter_stride = gamma.dimensions()[0] == 1 ? 0 : n;
  params.data = codes.data;
  params.data_t = codes.data_t;
  params.amax = codes.amax;
  params.groups = groups;
  params.m = m;
  params.n = n;
  return ToError(kOp, LaunchQuantizeNorm(params, stream));
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_EXPORT_HANDLER(jaxfp8_quantize_norm_v1);
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize_norm_v1, jaxfp8::cuda::QuantizeNormHandler,
                             xla::ffi::Ffi::Bind()
                                 .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                 .Arg<xla::ffi::AnyBuffer>()  // x
                                 .Arg<xla::ffi::AnyBuffer>()  // scale
                                 .Arg<xla::ffi::AnyBuffer>()  // amax
                                 .Arg<xla::ffi::AnyBuffer>()  // gamma
                                 .RemainingArgs()             // beta
                                 .Ret<xla::ffi::AnyBuffer>()  // data
                                 .Ret<xla::ffi::AnyBuffer>()  // amax
                                 .RemainingRets()             // data_t
                                 .Attr<std::string_view>("kind")
                                 .Attr<float>("epsilon")
                                 .Attr<bool>("has_beta"),
                             {jaxfp8::cuda::kRecordable});
