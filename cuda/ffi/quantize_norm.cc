// jaxfp8_quantize_norm_v2: x [g, m, n], scale f32 [1] or [g], amax_so_far as scale or [0], statistics f32 [g, m, 1], rstd, or
// [g, m, 2], with the mean, gamma f32 [1, n] or [g, n], beta f32 [0] or, with a mean, as gamma -> data fp8 [g, m, n], amax as
// amax_so_far, and, if there is a third result, data_t [g, n, m].
#include "cuda/kernels/quantize_norm.h"

#include "cuda/ffi/tiles.h"

namespace jaxfp8::cuda {
namespace {

constexpr const char* kOp = "quantize_norm";

ffi::Error QuantizeNormHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer amax_so_far,
                               ffi::AnyBuffer statistics, ffi::AnyBuffer gamma, ffi::AnyBuffer beta,
                               ffi::Result<ffi::AnyBuffer> data, ffi::Result<ffi::AnyBuffer> amax,
                               ffi::RemainingRets rest, ffi::Dictionary attributes) {
  JAXFP8_RETURN_IF_ERROR(CheckNoAttributes(kOp, attributes));
  const Operand x_operand{kOp, "x", x};
  JAXFP8_RETURN_IF_ERROR(CheckHighPrecision(x_operand));
  JAXFP8_RETURN_IF_ERROR(CheckInput(x_operand, 3));
  const int64_t groups = x.dimensions()[0], m = x.dimensions()[1], n = x.dimensions()[2];
  const Operand statistics_operand{kOp, "statistics", statistics};
  JAXFP8_RETURN_IF_ERROR(CheckRank(statistics_operand, 3));
  const bool has_mean = statistics.dimensions()[2] == 2;
  JAXFP8_RETURN_IF_ERROR(CheckArray(statistics_operand, ffi::DataType::F32, {groups, m, has_mean ? 2 : 1}));
  const Operand gamma_operand{kOp, "gamma", gamma};
  JAXFP8_RETURN_IF_ERROR(CheckRank(gamma_operand, 2));
  const int64_t rows = gamma.dimensions()[0] == 1 ? 1 : groups;
  JAXFP8_RETURN_IF_ERROR(CheckArray(gamma_operand, ffi::DataType::F32, {rows, n}));
  const Operand beta_operand{kOp, "beta", beta};
  if (!IsNone(beta)) {
    JAXFP8_RETURN_IF_ERROR(CheckArray(beta_operand, ffi::DataType::F32, {rows, n}));
    if (!has_mean) return Mismatch(beta_operand, "F32[0] where there is no mean");
  }
  QuantizeNormParams params = {};
  JAXFP8_RETURN_IF_ERROR(CheckTiles(kOp, x, scale, amax_so_far, *data, *amax, rest, &params));
  params.statistics = FloatsOrNull(statistics);
  params.has_mean = has_mean;
  params.gamma = FloatsOrNull(gamma);
  params.beta = FloatsOrNull(beta);
  params.parameter_stride = rows == 1 ? 0 : n;
  return ToError(kOp, LaunchQuantizeNorm(params, stream));
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize_norm_v2, jaxfp8::cuda::QuantizeNormHandler,
                             jaxfp8::cuda::OnStream()
                                 .Arg<xla::ffi::AnyBuffer>()  // x
                                 .Arg<xla::ffi::AnyBuffer>()  // scale
                                 .Arg<xla::ffi::AnyBuffer>()  // amax_so_far
                                 .Arg<xla::ffi::AnyBuffer>()  // statistics
                                 .Arg<xla::ffi::AnyBuffer>()  // gamma
                                 .Arg<xla::ffi::AnyBuffer>()  // beta
                                 .Ret<xla::ffi::AnyBuffer>()  // data
                                 .Ret<xla::ffi::AnyBuffer>()  // amax
                                 .RemainingRets()             // data_t
                                 .Attrs(),
                             {jaxfp8::cuda::kRecordable});
