// jaxfp8_push_amaxes_v1: k histories f32 [g, H], k amaxes f32 [g] -> k histories, in place where XLA aliases them.
#include "cpu/kernels/push_amaxes.h"

#include "common/history_checks.h"

namespace jaxfp8::cpu {
namespace {

ffi::Error PushAmaxesHandler(ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes) {
  JAXFP8_RETURN_IF_ERROR(CheckNoAttributes("push_amaxes", attributes));
  PushAmaxesParams params = {};
  JAXFP8_RETURN_IF_ERROR(ToPushAmaxes(operands, results, &params));
  PushAmaxes(params);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxfp8::cpu

JAXFP8_EXPORT_HANDLER(jaxfp8_push_amaxes_v1);
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_push_amaxes_v1, jaxfp8::cpu::PushAmaxesHandler,
                             xla::ffi::Ffi::Bind()
                                 .RemainingArgs()  // histories, amaxes
                                 .RemainingRets()  // histories
                                 .Attrs());
