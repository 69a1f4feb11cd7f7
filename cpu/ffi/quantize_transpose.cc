// jaxfp8_quantize_transpose_v2: x [g, m, n], scale f32 [1] or [g], amax_so_far f32 [g] -> data [g, m, n],
// data_t [g, n, m], amax f32 [g]; and, if a fourth result is asked for, column_sums f32 [g, ceil(m / 128), n].
// jaxfp8_quantize_transpose_counted_v1: the same -> the same, with counts u32 [g, 4] after the amax.
//
// The amax is raised in place where XLA aliases the two; elsewhere it starts as a copy.
#include "cpu/kernels/quantize_transpose.h"

#include "common/quantize_checks.h"
#include "cpu/ffi/support.h"

namespace jaxfp8::cpu {
namespace {

ffi::Error Run(const char* op, ffi::ThreadPool& pool, const QuantizeBuffers& buffers, ffi::RemainingRets rest,
               const ffi::Dictionary& attributes) {
  JAXFP8_RETURN_IF_ERROR(CheckQuantize(op, buffers, attributes));
  float* column_sums = nullptr;
  JAXFP8_RETURN_IF_ERROR(ToColumnSums(op, buffers.counts == nullptr ? 3 : 4, rest, buffers.x, &column_sums));

  XlaTaskPool tasks(pool);
  QuantizeTranspose(tasks, ToDtype(buffers.x.element_type()), ToDtype(buffers.data.element_type()),
                    buffers.x.untyped_data(), ToScales(buffers.scale), buffers.Groups(), buffers.Rows(),
                    buffers.Columns(), static_cast<uint8_t*>(buffers.data.untyped_data()),
                    static_cast<uint8_t*>(buffers.data_t->untyped_data()),
                    static_cast<const float*>(buffers.amax_so_far.untyped_data()),
                    static_cast<float*>(buffers.amax.untyped_data()), column_sums, buffers.CountsOrNull());
  return ffi::Error::Success();
}

ffi::Error QuantizeTransposeHandler(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                                    ffi::AnyBuffer amax_so_far, ffi::Result<ffi::AnyBuffer> data,
                                    ffi::Result<ffi::AnyBuffer> data_t, ffi::Result<ffi::AnyBuffer> amax,
                                    ffi::RemainingRets rest, ffi::Dictionary attributes) {
  return Run("quantize_transpose", pool, {x, scale, amax_so_far, *data, *amax, &*data_t}, rest, attributes);
}

ffi::Error QuantizeTransposeCountedHandler(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                                           ffi::AnyBuffer amax_so_far, ffi::Result<ffi::AnyBuffer> data,
                                           ffi::Result<ffi::AnyBuffer> data_t, ffi::Result<ffi::AnyBuffer> amax,
                                           ffi::Result<ffi::AnyBuffer> counts, ffi::RemainingRets rest,
                                           ffi::Dictionary attributes) {
  const QuantizeBuffers buffers{x, scale, amax_so_far, *data, *amax, &*data_t, &*counts};
  return Run("quantize_transpose_counted", pool, buffers, rest, attributes);
}

// What both handlers take, and the results that both begin with; then come counts, where they are asked for, and
// column_sums.
auto Bind() {
  return ffi::Ffi::Bind()
      .Ctx<ffi::ThreadPool>()
      .Arg<ffi::AnyBuffer>()  // x
      .Arg<ffi::AnyBuffer>()  // scale
      .Arg<ffi::AnyBuffer>()  // amax_so_far
      .Ret<ffi::AnyBuffer>()  // data
      .Ret<ffi::AnyBuffer>()  // data_t
      .Ret<ffi::AnyBuffer>();  // amax
}

}  // namespace
}  // namespace jaxfp8::cpu

JAXFP8_EXPORT_HANDLER(jaxfp8_quantize_transpose_v2);
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize_transpose_v2, jaxfp8::cpu::QuantizeTransposeHandler,
                             jaxfp8::cpu::Bind().RemainingRets().Attrs());

JAXFP8_EXPORT_HANDLER(jaxfp8_quantize_transpose_counted_v1);
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize_transpose_counted_v1, jaxfp8::cpu::QuantizeTransposeCountedHandler,
                             jaxfp8::cpu::Bind().Ret<xla::ffi::AnyBuffer>().RemainingRets().Attrs());
