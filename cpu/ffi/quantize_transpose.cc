// jaxfp8_quantize_transpose_v2: x [g, m, n], scale f32 [1] or [g], amax_so_far f32 [g] -> data [g, m, n],
// data_t [g, n, m], amax f32 [g]; and, if a fourth result is asked for, column_sums f32 [g, ceil(m / 128), n].
//
// The amax is raised in place where XLA aliases the two; elsewhere it starts as a copy.
#include "cpu/kernels/quantize_transpose.h"

#include "cpu/ffi/support.h"

namespace jaxfp8::cpu {
namespace {

constexpr const char* kOp = "quantize_transpose";

ffi::Error QuantizeTransposeHandler(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::AnyBuffer scale,
                                    ffi::AnyBuffer amax_so_far, ffi::Result<ffi::AnyBuffer> data,
                                    ffi::Result<ffi::AnyBuffer> data_t,
                                    ffi::Result<ffi::AnyBuffer> amax,
                                    ffi::RemainingRets rest, ffi::Dictionary attributes) {
  JAXFP8_RETURN_IF_ERROR(CheckNoAttributes("quantize_transpose", attributes));
  const Operand x_operand{kOp, "x", x};
  JAXFP8_RETURN_IF_ERROR(CheckHighPrecision(x_operand));
  JAXFP8_RETURN_IF_ERROR(CheckInput(x_operand, 3));
  const int64_t groups = x.dimensions()[0];
  const int64_t m = x.dimensions()[1];
  const int64_t n = x.dimensions()[2];
  const Operand data_operand{kOp, "data", *data};
  const Operand data_t_operand{kOp, "data_t", *data_t};
  JAXFP8_RETURN_IF_ERROR(CheckScale({kOp, "scale", scale}, groups));
  JAXFP8_RETURN_IF_ERROR(CheckFp8(data_operand));
  JAXFP8_RETURN_IF_ERROR(CheckShape(data_operand, {groups, m, n}));
  JAXFP8_RETURN_IF_ERROR(CheckDtype(data_t_operand, {data->element_type()}));
  JAXFP8_RETURN_IF_ERROR(CheckShape(data_t_operand, {groups, n, m}));
  JAXFP8_RETURN_IF_ERROR(CheckAmax({kOp, "amax_so_far", amax_so_far}, groups));
  JAXFP8_RETURN_IF_ERROR(CheckAmax({kOp, "amax", *amax}, groups));
  float* column_sums = nullptr;
  JAXFP8_RETURN_IF_ERROR(ToColumnSums(rest, x, &column_sums));

  XlaTaskPool tasks(pool);
  QuantizeTranspose(tasks, ToDtype(x.element_type()), ToDtype(data->element_type()), x.untyped_data(),
                    ToScales(scale), groups, m, n, static_cast<uint8_t*>(data->untyped_data()),
                    static_cast<uint8_t*>(data_t->untyped_data()),
                    static_cast<const float*>(amax_so_far.untyped_data()),
                    static_cast<float*>(amax->untyped_data()), column_sums);
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxfp8::cpu

JAXFP8_EXPORT_HANDLER(jaxfp8_quantize_transpose_v2);
XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxfp8_quantize_transpose_v2, jaxfp8::cpu::QuantizeTransposeHandler,
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
