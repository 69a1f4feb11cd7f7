// jaxfp8_amax_to_scale_v1: amax f32 [g], stored f32 [g] -> scale f32 [g], scale_inv f32 [g].
#include "cuda/kernels/amax_to_scale.h"

#include "cuda/ffi/support.h"

namespace jaxfp8::cuda {
namespace {

constexpr char kOp[] = "amax_to_scale";

ffi::Error AmaxToScaleHandler(cudaStream_t stream, ffi::AnyBuffer amax, ffi::AnyBuffer stored,
                              ffi::Result<ffi::AnyBuffer> scale, ffi::Result<ffi::AnyBuffer> scale_inv,
                              float numerator) {
  const Operand amax_operand{kOp, "amax", amax};
  JAXFP8_RETURN_IF_ERROR(CheckDtype(amax_operand, {ffi::DataType::F32}));
  JAXFP8_RETURN_IF_ERROR(CheckInput(amax_operand, 1));
  const int64_t groups = amax.dimensions()[0];
  const Operand others[] = {{kOp, "stored", stored}, {kOp, "scale", *scale}, {kOp, "scale_inv", *scale_inv}};
  for (const Operand& other : others) {
    JAXFP8_RETURN_IF_ERROR(CheckDtype(other, {ffi::DataType::F32}));
    JAXFP8_RETURN_IF_ERROR(CheckShape(other, {groups}));
  }
  JAXFP8_RETURN_IF_ERROR(CheckPositiveNormal(kOp, "numerator", numerator));

  AmaxToScaleParams params = {};
  params.amax = static_cast<const float*>(amax.untyped_data());
  params.stored = static_cast<const float*>(stored.untyped_data());
  params.numerator = numerator;
  params.scale = static_cast<float*>(scale->untyped_data());
  params.scale_inv = static_cast<float*>(scale_inv->untyped_data());
  params.count = groups;
  return ToError(kOp, LaunchAmaxToScale(params, stream));
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_EXPORT_HANDLER(jaxfp8_amax_to_scale_v1);
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_amax_to_scale_v1, jaxfp8::cuda::AmaxToScaleHandler,
                             xla::ffi::Ffi::Bind()
                                 .Ctx<xla::ffi::PlatformStream<cudaStream_t>>()
                                 .Arg<xla::ffi::AnyBuffer>()  // amax
                                 .Arg<xla::ffi::AnyBuffer>()  // stored
                                 .Ret<xla::ffi::AnyBuffer>()  // scale
                                 .Ret<xla::ffi::AnyBuffer>()  // scale_inv
                                 .Attr<float>("numerator"),
                             {jaxfp8::cuda::kRecordable});
