// jaxfp8_amax_v1: x [g, n] -> amax f32 [g].
#include "cpu/kernels/amax.h"

#include "cpu/ffi/support.h"

namespace jaxfp8::cpu {
namespace {

ffi::Error AmaxHandler(ffi::ThreadPool pool, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> amax,
                       ffi::Dictionary attributes) {
  JAXFP8_RETURN_IF_ERROR(CheckNoAttributes("amax", attributes));
  const Operand x_operand{"amax", "x", x};
  JAXFP8_RETURN_IF_ERROR(CheckHighPrecision(x_operand));
  JAXFP8_RETURN_IF_ERROR(CheckInput(x_operand, 2));
  const int64_t groups = x.dimensions()[0];
  const int64_t size = x.dimensions()[1];
  JAXFP8_RETURN_IF_ERROR(CheckAmax({"amax", "amax", *amax}, groups));

  XlaTaskPool tasks(pool);
  Amax(tasks, ToDtype(x.element_type()), x.untyped_data(), groups, size, static_cast<float*>(amax->untyped_data()));
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxfp8::cpu

JAXFP8_EXPORT_HANDLER(jaxfp8_amax_v1);
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_amax_v1, jaxfp8::cpu::AmaxHandler,
                             xla::ffi::Ffi::Bind()
                                 .Ctx<xla::ffi::ThreadPool>()
                                 .Arg<xla::ffi::AnyBuffer>()  // x
                                 .Ret<xla::ffi::AnyBuffer>()  // amax
                                 .Attrs());
