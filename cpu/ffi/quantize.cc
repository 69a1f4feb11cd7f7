// jaxfp8_quantize_v2: x [g, n], scale f32 [1] or [g], amax_so_far f32 [g] -> data fp8 [g, n], amax f32 [g].
// jaxfp8_quantize_counted_v1: the same -> the same, and counts u32 [g, 4].
//
// The amax is raised in place where XLA aliases the two; elsewhere it starts as a copy.
#include "cpu/kernels/quantize.h"

#include "common/quantize_checks.h"
#include "cpu/ffi/support.h"

namespace jaxfp8::cpu {
namespace {

ffi::Error Run(const char* op, ffi::ThreadPool& pool, const QuantizeBuffers& buffers,
               const ffi::Dictionary& attributes) {
  JAXFP8_RETURN_IF_ERROR(CheckQuantize(op, buffers, attributes));
  XlaTaskPool tasks(pool);
  Quantize(tasks, ToDtype(buffers.x.element_type()), ToDtype(buffers.data.element_type()), buffers.x.untyped_data(),
           ToScales(buffers.scale), buffers.Groups(), buffers.Columns(),
           static_cast<uint8_t*>(buffers.data.untyped_data()),
           static_cast<const float*>(buffers.amax_so_far.untyped_data()),
           static_cast<float*>(buffers.amax.untyped_data()), buffers.CountsOrNull());
  return ffi::Error::Success();
}

ffi::Error QuantizeHandler(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer amax_so_far,
                           ffi::Result<ffi::AnyBuffer> data, ffi::Result<ffi::AnyBuffer> amax,
                           ffi::Dictionary attributes) {
  return Run("quantize", pool, {x, scale, amax_so_far, *data, *amax}, attributes);
}

ffi::Error QuantizeCountedHandler(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                                  ffi::AnyBuffer amax_so_far, ffi::Result<ffi::AnyBuffer> data,
                                  ffi::Result<ffi::AnyBuffer> amax, ffi::Result<ffi::AnyBuffer> counts,
                                  ffi::Dictionary attributes) {
  return Run("quantize_counted", pool, {x, scale, amax_so_far, *data, *amax, nullptr, &*counts}, attributes);
}

// What both handlers take, and the results that both begin with; then come counts, where they are asked for.
auto Bind() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::AnyBuffer>()  // x
      .Arg<ffi::AnyBuffer>()  // scale
      .Arg<ffi::AnyBuffer>()  // amax_so_far
      .Ret<ffi::AnyBuffer>()  // data
      .Ret<ffi::AnyBuffer>();  // amax
}

}  // namespace
}  // namespace jaxfp8::cpu

JAXFP8_EXPORT_HANDLER(jaxfp8_quantize_v2);
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize_v2, jaxfp8::cpu::QuantizeHandler,
                             jaxfp8::cpu::Bind().Attrs());

JAXFP8_EXPORT_HANDLER(jaxfp8_quantize_counted_v1);
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize_counted_v1, jaxfp8::cpu::QuantizeCountedHandler,
                             jaxfp8::cpu::Bind().Ret<xla::ffi::AnyBuffer>().Attrs());
