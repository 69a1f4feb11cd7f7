// jaxfp8_quantize_v3: x [g, n], scale f32 [1] or [g], amax_so_far f32 [g] -> data fp8 [g, n], amax f32 [g].
//
// The amax is raised in place where XLA aliases the two; elsewhere it starts as a copy. An amax_so_far of f32 [0] means
// zeros; an amax of f32 [0] means that nobody wants it.
#include "cuda/kernels/quantize.h"

#include "common/quantize_checks.h"
#include "cuda/ffi/support.h"

namespace jaxfp8::cuda {
namespace {

ffi::Error QuantizeHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer amax_so_far,
                           ffi::Result<ffi::AnyBuffer> data, ffi::Result<ffi::AnyBuffer> amax,
                           ffi::Dictionary attributes) {
  const QuantizeBuffers buffers{x, scale, amax_so_far, *data, *amax};
  JAXFP8_RETURN_IF_ERROR(CheckQuantize("quantize", buffers, attributes));
  QuantizeParams params = {};
  params.dtype = ToDtype(x.element_type());
  params.format = ToDtype(data->element_type());
  params.x = x.untyped_data();
  params.scale = static_cast<const float*>(scale.untyped_data());
  params.scale_stride = ScaleStride(scale);
  params.data = data->untyped_data();
  params.amax_so_far = buffers.AmaxSoFarOrNull();
  params.amax = buffers.AmaxOrNull();
  params.groups = buffers.Groups();
  params.size = buffers.Columns();
  return ToError("quantize", LaunchQuantize(params, stream));
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_EXPORT_HANDLER(jaxfp8_quantize_v3);
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize_v3, jaxfp8::cuda::QuantizeHandler,
                             xla::ffi::Ffi::Bind()
                                 .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                 .Arg<xla::ffi::AnyBuffer>()  // x
                                 .Arg<xla::ffi::AnyBuffer>()  // scale
                                 .Arg<xla::ffi::AnyBuffer>()  // amax_so_far
                                 .Ret<xla::ffi::AnyBuffer>()  // data
                                 .Ret<xla::ffi::AnyBuffer>()  // amax
                                 .Attrs(),
                             {jaxfp8::cuda::kRecordable});
