// jaxfp8_delayed_scales_v1: k histories f32 [g, H], k stored f32 [g] -> k histories, scales, scale_invs, amaxes.
#include "cpu/kernels/delayed_scales.h"

#include "common/history_checks.h"

namespace jaxfp8::cpu {
namespace {

ffi::Error DelayedScalesHandler(ffi::RemainingArgs operands, ffi::RemainingRets results,
                                ffi::Span<const float> numerators, bool most_recent) {
  DelayedScalesParams params = {};
  JAXFP8_RETURN_IF_ERROR(ToDelayedScales(operands, results, numerators, most_recent, &params));
  DelayedScales(params);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxfp8::cpu

JAXFP8_EXPORT_HANDLER(jaxfp8_delayed_scales_v1);
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_delayed_scales_v1, jaxfp8::cpu::DelayedScalesHandler,
                             xla::ffi::Ffi::Bind()
                                 .RemainingArgs()  // histories, stored
                                 .RemainingRets()  // histories, scales, scale_invs, amaxes
                                 .Attr<xla::ffi::Span<const float>>("numerators")
                                 .Attr<bool>("most_recent"));
