// jaxfp8_amax_to_scale_v1: amax f32 [g], stored f32 [g] -> scale f32 [g], scale_inv f32 [g].
#include "cpu/kernels/amax_to_scale.h"

#include "cpu/ffi/support.h"

namespace jaxfp8::cpu {
namespace {

constexpr char kOp[] = "amax_to_scale";

ffi::Error AmaxToScaleHandler(ffi::AnyBuffer amax, ffi::AnyBuffer stored, ffi::Result<ffi::AnyBuffer> scale,
                              ffi::Result<ffi::AnyBuffer> scale_inv, float numerator) {
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

  AmaxToScale(static_cast<const float*>(amax.untyped_data()), static_cast<const float*>(stored.untyped_data()),
              numerator, groups, static_cast<float*>(scale->untyped_data()),
              static_cast<float*>(scale_inv->untyped_data()));
  return ffi::Error::Success();
}

}  // namespace
}  // namespace jaxfp8::cpu

JAXFP8_EXPORT_HANDLER(jaxfp8_amax_to_scale_v1);
JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_amax_to_scale_v1, jaxfp8::cpu::AmaxToScaleHandler,
                             xla::ffi::Ffi::Bind()
                                 .Arg<xla::ffi::AnyBuffer>()  // amax
                                 .Arg<xla::ffi::AnyBuffer>()  // stored
                                 .Ret<xla::ffi::AnyBuffer>()  // scale
                                 .Ret<xla::ffi::AnyBuffer>()  // scale_inv
                                 .Attr<float>("numerator"));
