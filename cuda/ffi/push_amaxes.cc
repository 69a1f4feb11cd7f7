// jaxfp8_push_amaxes_v1: k histories f32 [g, H], k amaxes f32 [g] -> k histories, in place where XLA aliases them.
#include "cuda/kernels/push_amaxes.h"

#include "common/history_checks.h"
#include "cuda/ffi/support.h"

namespace jaxfp8::cuda {
namespace {

ffi::Error PushAmaxesHandler(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                             ffi::Dictionary attributes) {
  JAXFP8_RETURN_IF_ERROR(CheckNoAttributes("push_amaxes", attributes));
  PushAmaxesParams params = {};
  JAXFP8_RETURN_IF_ERROR(ToPushAmaxes(operands, results, &params));
  return ToError("push_amaxes", LaunchPushAmaxes(params, stream));
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_EXPORT_HANDLER(jaxfp8_push_amaxes_v1);
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_push_amaxes_v1, jaxfp8::cuda::PushAmaxesHandler,
                             xla::ffi::Ffi::Bind()
                                 .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                 .RemainingArgs()  // histories, amaxes
                                 .RemainingRets()  // histories
                                 .Attrs(),
                             {jaxfp8::cuda::kRecordable});
