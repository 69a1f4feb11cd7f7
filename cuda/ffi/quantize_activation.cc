// jaxfp8_quantize_activation_v2: x [g, m, 1 or 2, n], scale f32 [1] or [g], amax_so_far as scale or [0] -> data
// fp8 [g, m, n], amax as amax_so_far, and, if there is a third result, data_t [g, n, m].
#include "cuda/kernels/quantize_activation.h"

#include "cuda/ffi/activations.h"
#include "cuda/ffi/tiles.h"

namespace jaxfp8::cuda {
namespace {

constexpr const char* kOp = "quantize_activation";

ffi::Error QuantizeActivationHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                                     ffi::AnyBuffer amax_so_far, ffi::Result<ffi::AnyBuffer> data,
                                     ffi::Result<ffi::AnyBuffer> amax, ffi::RemainingRets rest,
                                     ffi::Dictionary attributes) {
  QuantizeActivationParams params = {};
  JAXFP8_RETURN_IF_ERROR(CheckActivation(kOp, x, attributes, &params));
  JAXFP8_RETURN_IF_ERROR(CheckTiles(kOp, x, scale, amax_so_far, *data, *amax, rest, &params));
  return ToError(kOp, LaunchQuantizeActivation(params, stream));
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize_activation_v2, jaxfp8::cuda::QuantizeActivationHandler,
                             jaxfp8::cuda::OnStream()
                                 .Arg<xla::ffi::AnyBuffer>()  // x
                                 .Arg<xla::ffi::AnyBuffer>()  // scale
                                 .Arg<xla::ffi::AnyBuffer>()  // amax_so_far
                                 .Ret<xla::ffi::AnyBuffer>()  // data
                                 .Ret<xla::ffi::AnyBuffer>()  // amax
                                 .RemainingRets()             // data_t
                                 .Attrs(),
                             {jaxfp8::cuda::kRecordable});
