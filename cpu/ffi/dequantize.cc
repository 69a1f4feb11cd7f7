// jaxfp8_dequantize_v1: data fp8 [g, ...], scale_inv f32 [1] or [g] -> out of that shape.
#include "cpu/kernels/dequantize.h"

#include "cpu/ffi/support.h"

namespace jaxfp8::cpu {
namespace {

ffi::Error DequantizeHandler(ffi::ThreadPool pool, ffi::AnyBuffer data, ffi::AnyBuffer scale_inv,
                             ffi::Result<ffi::AnyBuffer> out,
                             ffi::Dictionary attributes) {
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

  XlaTaskPool tasks(pool);
  Dequantize(tasks, ToDtype(data.element_type()), ToDtype(out->element_type()),
             static_cast<const uint8_t*>(data.untyped_data()), ToScales(scale_inv), groups, size, out->untyped_data());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxfp8::cpu

JAXFP8_EXPORT_HANDLER(jaxfp8_dequantize_v1);
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_dequantize_v1, jaxfp8::cpu::DequantizeHandler,
                             xla::ffi::Ffi::Bind()
                                 .Ctx<xla::ffi::ThreadPool>()
                                 .Arg<xla::ffi::AnyBuffer>()  // data
                                 .Arg<xla::ffi::AnyBuffer>()  // scale_inv
                                 .Ret<xla::ffi::AnyBuffer>()  // out
                                 .Attrs());
