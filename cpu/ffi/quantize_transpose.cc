// jaxfp8_quantize_transpose_v3: x [g, m, n], scale f32 [1] or [g], amax_so_far f32 [g] -> data [g, m, n],
// data_t [g, n, m], amax f32 [g]; and, if a fourth result is asked for, column_sums f32 [g, ceil(m / 128), n].
//
// The amax is raised in place where XLA aliases the two; elsewhere it starts as a copy. An amax_so_far of f32 [0] means
// zeros; an amax of f32 [0] means that nobody wants it.
#include "cpu/kernels/quantize_transpose.h"

#include "common/quantize_checks.h"
#include "cpu/ffi/support.h"

namespace jaxfp8::cpu {
namespace {

ffi::Error QuantizeTransposeHandler(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                                    ffi::AnyBuffer amax_so_far, ffi::Result<ffi::AnyBuffer> data,
                                    ffi::Result<ffi::AnyBuffer> data_t, ffi::Result<ffi::AnyBuffer> amax,
                                    ffi::RemainingRets rest, ffi::Dictionary attributes) {
  const QuantizeBuffers buffers{x, scale, amax_so_far, *data, *amax, &*data_t};
  JAXFP8_RETURN_IF_ERROR(CheckQuantize("quantize_transpose", buffers, attributes));
  float* column_sums = nullptr;
  JAXFP8_RETURN_IF_ERROR(ToColumnSums(rest, x, &column_sums));

  XlaTaskPool tasks(pool);
  QuantizeTranspose(tasks, ToDtype(x.element_type()), ToDtype(data->element_type()), x.untyped_data(), ToScales(scale),
                    buffers.Groups(), buffers.Rows(), buffers.Columns(), static_cast<uint8_t*>(data->untyped_data()),
                    static_cast<uint8_t*>(data_t->untyped_data()), buffers.AmaxSoFarOrNull(), buffers.AmaxOrNull(),
                    column_sums);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxfp8::cpu

JAXFP8_EXPORT_HANDLER(jaxfp8_quantize_transpose_v3);
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize_transpose_v3, jaxfp8::cpu::QuantizeTransposeHandler,
                             xla::ffi::Ffi::Bind()
                                 .Ctx<xla::ffi::ThreadPool>()
                                 .Arg<xla::ffi::AnyBuffer>()  // x
                                 .Arg<xla::ffi::AnyBuffer>()  // scale
                                 .Arg<xla::ffi::AnyBuffer>()  // amax_so_far
                                 .Ret<xla::ffi::AnyBuffer>()  // data
                                 .Ret<xla::ffi::AnyBuffer>()  // data_t
                                 .Ret<xla::ffi::AnyBuffer>()  // amax
                                 .RemainingRets()             // column_sums
                                 .Attrs());
