// jaxfp8_quantize_v2: x [g, n], scale f32 [1] or [g], amax_so_far f32 [g] -> data fp8 [g, n], amax f32 [g].
//
// The amax is raised in place where XLA aliases the two; elsewhere it starts as a copy.
#include "cuda/kernels/quantize.h"

#include "common/quantize_checks.h"
#include "cuda/ffi/support.h"

namespace jaxfp8::cuda {
namespace {

ffi::Error Run(const char* op, cudaStream_t stream, const QuantizeBuffers& buffers, const ffi::Dictionary& attributes) {
  JAXFP8_RETURN_IF_ERROR(CheckQuantize(op, buffers, attributes));
  QuantizeParams params = {};
  params.dtype = ToDtype(buffers.x.element_type());
  params.format = ToDtype(buffers.data.element_type());
  params.x = buffers.x.untyped_data();
  params.scale = static_cast<const float*>(buffers.scale.untyped_data());
  params.scale_stride = ScaleStride(buffers.scale);
  params.data = buffers.data.untyped_data();
  params.amax_so_far = static_cast<const float*>(buffers.amax_so_far.untyped_data());
  params.amax = static_cast<float*>(buffers.amax.untyped_data());
  params.groups = buffers.Groups();
  params.size = buffers.Columns();
  return ToError(op, LaunchQuantize(params, stream));
}

ffi::Error QuantizeHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer amax_so_far,
                           ffi::Result<ffi::AnyBuffer> data, ffi::Result<ffi::AnyBuffer> amax,
                           ffi::Dictionary attributes) {
  return Run("quantize", stream, {x, scale, amax_so_far, *data, *amax}, attributes);
}

// What both handlers take, and the results that both begin with; then come counts, where they are asked for.
auto Bind() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Arg<ffi::AnyBuffer>()  // x
      .Arg<ffi::AnyBuffer>()  // scale
      .Arg<ffi::AnyBuffer>()  // amax_so_far
      .Ret<ffi::AnyBuffer>()  // data
      .Ret<ffi::AnyBuffer>();  // amax
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_EXPORT_HANDLER(jaxfp8_quantize_v2);
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize_v2, jaxfp8::cuda::QuantizeHandler,
                             jaxfp8::cuda::Bind().Attrs(),
                             {jaxfp8::cuda::kRecordable});
