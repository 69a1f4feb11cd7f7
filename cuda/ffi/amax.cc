// jaxfp8_amax_v1: x [g, n] -> amax f32 [g].
#include "cuda/kernels/amax.h"

#include "cuda/ffi/support.h"

namespace jaxfp8::cuda {
namespace {

ffi::Error AmaxHandler(cudaStream_t stream, ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> amax,
                       ffi::Dictionary attributes) {
  JAXFP8_RETURN_IF_ERROR(CheckNoAttributes("amax", attributes));
  const Operand x_operand{"amax", "x", x};
  JAXFP8_RETURN_IF_ERROR(CheckHighPrecision(x_operand));
  JAXFP8_RETURN_IF_ERROR(CheckInput(x_operand, 2));
  const int64_t groups = x.dimensions()[0];
  JAXFP8_RETURN_IF_ERROR(CheckAmax({"amax", "amax", *amax}, groups));

  AmaxParams params = {};
  params.dtype = ToDtype(x.element_type());
  params.x = x.untyped_data();
  params.amax = static_cast<float*>(amax->untyped_data());
  params.groups = groups;
  params.size = x.dimensions()[1];
  return ToError("amax", LaunchAmax(params, stream));
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_EXPORT_HANDLER(jaxfp8_amax_v1);
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_amax_v1, jaxfp8::cuda::AmaxHandler,
                             xla::ffi::Ffi::Bind()
                                 .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                 .Arg<xla::ffi::AnyBuffer>()  // x
                                 .Ret<xla::ffi::AnyBuffer>()  // amax
                                 .Attrs(),
                             {jaxfp8::cuda::kRecordable});
