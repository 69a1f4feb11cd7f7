// jaxfp8_quantize_v3: x [g, n], scale f32 [1] or [g], amax_so_far f32 [g] -> data fp8 [g, n], amax f32 [g].
//
// The amax is raised in place where XLA aliases the two; elsewhere it starts as a copy. An amax_so_far of f32 [0] means
// zeros; an amax of f32 [0] means that nobody wants it.
#include "cpu/kernels/quantize.h"

#include "common/quantize_checks.h"
#include "cpu/ffi/support.h"

namespace jaxfp8::cpu {
namespace {

ffi::Error QuantizeHandler(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer amax_so_far,
                           ffi::Result<ffi::AnyBuffer> data, ffi::Result<ffi::AnyBuffer> amax,
                           ffi::Dictionary attributes) {
  const QuantizeBuffers buffers{x, scale, amax_so_far, *data, *amax};
  JAXFP8_RETURN_IF_ERROR(CheckQuantize("quantize", buffers, attributes));
  XlaTaskPool tasks(pool);
  Quantize(tasks, ToDtype(x.element_type()), ToDtype(data->element_type()), x.untyped_data(), ToScales(scale),
           buffers.Groups(), buffers.Columns(), static_cast<uint8_t*>(data->untyped_data()), buffers.AmaxSoFarOrNull(),
           buffers.AmaxOrNull());
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxfp8::cpu

JAXFP8_EXPORT_HANDLER(jaxfp8_quantize_v3);
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize_v3, jaxfp8::cpu::QuantizeHandler,
                             xla::ffi::Ffi::Bind()
                                 .Ctx<xla::ffi::ThreadPool>()
                                 .Arg<xla::ffi::AnyBuffer>()  // x
                                 .Arg<xla::ffi::AnyBuffer>()  // scale
                                 .Arg<xla::ffi::AnyBuffer>()  // amax_so_far
                                 .Ret<xla::ffi::AnyBuffer>()  // data
                                 .Ret<xla::ffi::AnyBuffer>()  // amax
                                 .Attrs());
