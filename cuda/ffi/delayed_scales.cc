// jaxfp8_delayed_scales_v1: k histories f32 [g, H], k stored f32 [g] -> k histories, scales, scale_invs, amaxes.
#include "cuda/kernels/delayed_scales.h"

#include "common/history_checks.h"
#include "cuda/ffi/support.h"

namespace jaxfp8::cuda {
namespace {

ffi::Error DelayedScalesHandler(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                                ffi::Span<const float> numerators, bool most_recent) {
  DelayedScalesParams params = {};
  JAXFP8_RETURN_IF_ERROR(ToDelayedScales(operands, results, numerators, most_recent, &params));
  return ToError("delayed_scales", LaunchDelayedScales(params, stream));
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_EXPORT_HANDLER(jaxfp8_delayed_scales_v1);
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_delayed_scales_v1, jaxfp8::cuda::DelayedScalesHandler,
                             xla::ffi::Ffi::Bind()
                                 .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                 .RemainingArgs()  // histories, stored
                                 .RemainingRets()  // histories, scales, scale_invs, amaxes
                                 .Attr<xla::ffi::Span<const float>>("numerators")
                                 .Attr<bool>("most_recent"),
                             {jaxfp8::cuda::kRecordable});
