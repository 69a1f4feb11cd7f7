// jaxfp8_dequantize_v1: data fp8 [g, ...], scale_inv f32 [1] or [g] -> out of that shape.
#include "cuda/kernels/dequantize.h"

#include "cuda/ffi/support.h"

namespace jaxfp8::cuda {
namespace {

ffi::Error DequantizeHandler(cudaStream_t stream, ffi::AnyBuffer data, ffi::AnyBuffer scale_inv,
                             ffi::Result<ffi::AnyBuffer> out, ffi::Dictionary attributes) {
  JAXFP8_RETURN_IF_ERROR(CheckNoAttributes("dequantize", attributes));
  const Operand data_operand{"dequantize", "data", data};
  JAXFP8_RETURN_IF_ERROR(CheckFp8(data_operand));
  JAXFP8_RETURN_IF_ERROR(CheckGrouped(data_operand));
  const int64_t groups = data.dimensions()[0];
  const int64_t size = groups == 0 ? 0 : static_cast<int64_t>(data.element_count()) / groups;
  const Operand out_operand{"dequantize", "out", *out};
  JAXFP8_RETURN_IF_ERROR(CheckScale({"dequantize", "scale_inv", scale_inv}, groups));
  JAXFP8_RETURN_IF_ERROR(CheckHighPrecision(out_operand));
  JAXFP8_RETURN_IF_ERROR(CheckShape(out_operand, data.dimensions()));

  DequantizeParams params = {};
  params.format = ToDtype(data.element_type());
  params.dtype = ToDtype(out->element_type());
  params.data = data.untyped_data();
  params.scale_inv = static_cast<const float*>(scale_inv.untyped_data());
  params.scale_stride = ScaleStride(scale_inv);
  params.out = out->untyped_data();
  params.groups = groups;
  params.size = size;
  return ToError("dequantize", LaunchDequantize(params, stream));
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_EXPORT_HANDLER(jaxfp8_dequantize_v1);
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_dequantize_v1, jaxfp8::cuda::DequantizeHandler,
                             xla::ffi::Ffi::Bind()
                                 .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                 .Arg<xla::ffi::AnyBuffer>()  // data
                                 .Arg<xla::ffi::AnyBuffer>()  // scale_inv
                                 .Ret<xla::ffi::AnyBuffer>()  // out
                                 .Attrs(),
                             {jaxfp8::cuda::kRecordable});
