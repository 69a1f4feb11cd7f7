// jaxfp8_quantize_transpose_v3: x [g, m, n], scale f32 [1] or [g], amax_so_far f32 [g] -> data [g, m, n],
// data_t [g, n, m], amax f32 [g]; and, if a fourth result is asked for, column_sums f32 [g, ceil(m / 128), n].
//
// The amax is raised in place where XLA aliases the two; elsewhere it starts as a copy. An amax_so_far of f32 [0] means
// zeros; an amax of f32 [0] means that nobody wants it.
#include "cuda/kernels/quantize_transpose.h"

#include "common/quantize_checks.h"
#include "cuda/ffi/support.h"

namespace jaxfp8::cuda {
namespace {

ffi::Error QuantizeTransposeHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                                    ffi::AnyBuffer amax_so_far, ffi::Result<ffi::AnyBuffer> data,
                                    ffi::Result<ffi::AnyBuffer> data_t, ffi::Result<ffi::AnyBuffer> amax,
                                    ffi::RemainingRets rest, ffi::Dictionary attributes) {
  const QuantizeBuffers buffers{x, scale, amax_so_far, *data, *amax, &*data_t};
  JAXFP8_RETURN_IF_ERROR(CheckQuantize("quantize_transpose", buffers, attributes));
  float* column_sums = nullptr;
  JAXFP8_RETURN_IF_ERROR(ToColumnSums(rest, x, &column_sums));

  QuantizeTransposeParams params = {};
  params.dtype = ToDtype(x.element_type());
  params.format = ToDtype(data->element_type());
  params.x = x.untyped_data();
  params.scale = static_cast<const float*>(scale.untyped_data());
  params.scale_stride = ScaleStride(scale);
  params.data = data->untyped_data();
  params.data_t = data_t->untyped_data();
  params.amax_so_far = buffers.AmaxSoFarOrNull();
  params.amax = buffers.AmaxOrNull();
  params.column_sums = column_sums;
  params.groups = buffers.Groups();
  params.m = buffers.Rows();
  params.n = buffers.Columns();
  return ToError("quantize_transpose", LaunchQuantizeTranspose(params, stream));
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_EXPORT_HANDLER(jaxfp8_quantize_transpose_v3);
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize_transpose_v3, jaxfp8::cuda::QuantizeTransposeHandler,
                             xla::ffi::Ffi::Bind()
                                 .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                 .Arg<xla::ffi::AnyBuffer>()  // x
                                 .Arg<xla::ffi::AnyBuffer>()  // scale
                                 .Arg<xla::ffi::AnyBuffer>()  // amax_so_far
                                 .Ret<xla::ffi::AnyBuffer>()  // data
                                 .Ret<xla::ffi::AnyBuffer>()  // data_t
                                 .Ret<xla::ffi::AnyBuffer>()  // amax
                                 .RemainingRets()             // column_sums
                                 .Attrs(),
                             {jaxfp8::cuda::kRecordable});
