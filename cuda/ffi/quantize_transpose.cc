// jaxfp8_quantize_transpose_v2: x [g, m, n], scale f32 [1] or [g], amax_so_far f32 [g] -> data [g, m, n],
// data_t [g, n, m], amax f32 [g]; and, if a fourth result is asked for, column_sums f32 [g, ceil(m / 128), n].
//
// The amax is raised in place where XLA aliases the two; elsewhere it starts as a copy.
#include "cuda/kernels/quantize_transpose.h"

#include "common/quantize_checks.h"
#include "cuda/ffi/support.h"

namespace jaxfp8::cuda {
namespace {

ffi::Error Run(const char* op, cudaStream_t stream, const QuantizeBuffers& buffers, ffi::RemainingRets rest,
               const ffi::Dictionary& attributes) {
  JAXFP8_RETURN_IF_ERROR(CheckQuantize(op, buffers, attributes));
  float* column_sums = nullptr;
  JAXFP8_RETURN_IF_ERROR(ToColumnSums(op, buffers.counts == nullptr ? 3 : 4, rest, buffers.x, &column_sums));

  QuantizeTransposeParams params = {};
  params.dtype = ToDtype(buffers.x.element_type());
  params.format = ToDtype(buffers.data.element_type());
  params.x = buffers.x.untyped_data();
  params.scale = static_cast<const float*>(buffers.scale.untyped_data());
  params.scale_stride = ScaleStride(buffers.scale);
  params.data = buffers.data.untyped_data();
  params.data_t = buffers.data_t->untyped_data();
  params.amax_so_far = static_cast<const float*>(buffers.amax_so_far.untyped_data());
  params.amax = static_cast<float*>(buffers.amax.untyped_data());
  params.column_sums = column_sums;
  params.groups = buffers.Groups();
  params.m = buffers.Rows();
  params.n = buffers.Columns();
  return ToError(op, LaunchQuantizeTranspose(params, stream));
}

ffi::Error QuantizeTransposeHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                                    ffi::AnyBuffer amax_so_far, ffi::Result<ffi::AnyBuffer> data,
                                    ffi::Result<ffi::AnyBuffer> data_t, ffi::Result<ffi::AnyBuffer> amax,
                                    ffi::RemainingRets rest, ffi::Dictionary attributes) {
  return Run("quantize_transpose", stream, {x, scale, amax_so_far, *data, *amax, &*data_t}, rest, attributes);
}

// What both handlers take, and the results that both begin with; then come counts, where they are asked for, and
// column_sums.
auto Bind() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::PlatformStream<cudaStream_t>>()
      .Arg<ffi::AnyBuffer>()  // x
      .Arg<ffi::AnyBuffer>()  // scale
      .Arg<ffi::AnyBuffer>()  // amax_so_far
      .Ret<ffi::AnyBuffer>()  // data
      .Ret<ffi::AnyBuffer>()  // data_t
      .Ret<ffi::AnyBuffer>();  // amax
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_EXPORT_HANDLER(jaxfp8_quantize_transpose_v2);
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize_transpose_v2, jaxfp8::cuda::QuantizeTransposeHandler,
                             jaxfp8::cuda::Bind().RemainingRets().Attrs(),
                             {jaxfp8::cuda::kRecordable});
