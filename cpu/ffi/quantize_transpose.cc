// jaxfp8_quantize_transpose_v2: x [g, m, n], scale f32 [1] or [g], amax_so_far f32 [g] -> data [g, m, n],
// data_t [g, n, m], amax f32 [g]; and, if a fourth result is asked for, column_sums f32 [g, ceil(m / 128), n].
// jaxfp8_quantize_transpose_counted_v1: the same -> the same, with counts u32 [g, 4] after the amax.
//
// The amax is raised in place where XLA aliases the two; elsewhere it starts as a copy.
#include "cpu/kernels/quantize_transpose.h"

#include "cpu/ffi/support.h"

namespace jaxfp8::cpu {
namespace {

// Without `counts_buffer` nothing is counted.
ffi::Error Run(const char* op, ffi::ThreadPool& pool, ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer amax_so_far,
               ffi::Result<ffi::AnyBuffer> data, ffi::Result<ffi::AnyBuffer> data_t, ffi::Result<ffi::AnyBuffer> amax,
               const ffi::AnyBuffer* counts_buffer, ffi::RemainingRets rest, const ffi::Dictionary& attributes) {
  JAXFP8_RETURN_IF_ERROR(CheckNoAttributes(op, attributes));
  const Operand x_operand{op, "x", x};
  JAXFP8_RETURN_IF_ERROR(CheckHighPrecision(x_operand));
  JAXFP8_RETURN_IF_ERROR(CheckInput(x_operand, 3));
  const int64_t groups = x.dimensions()[0];
  const int64_t m = x.dimensions()[1];
  const int64_t n = x.dimensions()[2];
  const Operand data_operand{op, "data", *data};
  const Operand data_t_operand{op, "data_t", *data_t};
  JAXFP8_RETURN_IF_ERROR(CheckScale({op, "scale", scale}, groups));
  JAXFP8_RETURN_IF_ERROR(CheckFp8(data_operand));
  JAXFP8_RETURN_IF_ERROR(CheckShape(data_operand, {groups, m, n}));
  JAXFP8_RETURN_IF_ERROR(CheckDtype(data_t_operand, {data->element_type()}));
  JAXFP8_RETURN_IF_ERROR(CheckShape(data_t_operand, {groups, n, m}));
  JAXFP8_RETURN_IF_ERROR(CheckAmax({op, "amax_so_far", amax_so_far}, groups));
  JAXFP8_RETURN_IF_ERROR(CheckAmax({op, "amax", *amax}, groups));
  Counts* counts = nullptr;
  JAXFP8_RETURN_IF_ERROR(ToCounts(op, counts_buffer, groups, &counts));
  float* column_sums = nullptr;
  JAXFP8_RETURN_IF_ERROR(ToColumnSums(op, counts == nullptr ? 3 : 4, rest, x, &column_sums));

  XlaTaskPool tasks(pool);
  QuantizeTranspose(tasks, ToDtype(x.element_type()), ToDtype(data->element_type()), x.untyped_data(),
                    ToScales(scale), groups, m, n, static_cast<uint8_t*>(data->untyped_data()),
                    static_cast<uint8_t*>(data_t->untyped_data()),
                    static_cast<const float*>(amax_so_far.untyped_data()),
                    static_cast<float*>(amax->untyped_data()), column_sums, counts);
  return ffi::Error::Success();
}

ffi::Error QuantizeTransposeHandler(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                                    ffi::AnyBuffer amax_so_far, ffi::Result<ffi::AnyBuffer> data,
                                    ffi::Result<ffi::AnyBuffer> data_t,
                                    ffi::Result<ffi::AnyBuffer> amax,
                                    ffi::RemainingRets rest, ffi::Dictionary attributes) {
  return Run("quantize_transpose", pool, x, scale, amax_so_far, data, data_t, amax, nullptr, rest, attributes);
}

ffi::Error QuantizeTransposeCountedHandler(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                                           ffi::AnyBuffer amax_so_far, ffi::Result<ffi::AnyBuffer> data,
                                           ffi::Result<ffi::AnyBuffer> data_t, ffi::Result<ffi::AnyBuffer> amax,
                                           ffi::Result<ffi::AnyBuffer> counts, ffi::RemainingRets rest,
                                           ffi::Dictionary attributes) {
  return Run("quantize_transpose_counted", pool, x, scale, amax_so_far, data, data_t, amax, &*counts, rest,
             attributes);
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
