// jaxfp8_amax_to_scale_v1: amax f32 [g], stored f32 [g] -> scale f32 [g], scale_inv f32 [g].
#ifndef JAXFP8_COMMON_FFI_AMAX_TO_SCALE_H_
#define JAXFP8_COMMON_FFI_AMAX_TO_SCALE_H_

#include <utility>

#include "common/ffi/checks.h"
#include "common/params.h"

namespace jaxfp8 {

struct AmaxToScaleOp {
  static constexpr char kName[] = "amax_to_scale";
  using Params = AmaxToScaleParams;

  template <class Binding>
  static auto Bind(Binding context) {
    return std::move(context)
        .template Arg<ffi::AnyBuffer>()  // amax
        .template Arg<ffi::AnyBuffer>()  // stored
        .template Ret<ffi::AnyBuffer>()  // scale
        .template Ret<ffi::AnyBuffer>()  // scale_inv
        .template Attr<float>("numerator");
  }

  static ffi::Error ToParams(ffi::AnyBuffer amax, ffi::AnyBuffer stored, ffi::Result<ffi::AnyBuffer> scale,
                             ffi::Result<ffi::AnyBuffer> scale_inv, float numerator, Params* params) {
    const Operand amax_operand{kName, "amax", amax};
    JAXFP8_RETURN_IF_ERROR(CheckDtype(amax_operand, {ffi::DataType::F32}));
    JAXFP8_RETURN_IF_ERROR(CheckInput(amax_operand, 1));
    params->count = amax.dimensions()[0];
    const Operand others[] = {{kName, "stored", stored}, {kName, "scale", *scale}, {kName, "scale_inv", *scale_inv}};
    for (const Operand& other : others) {
      JAXFP8_RETURN_IF_ERROR(CheckArray(other, ffi::DataType::F32, {params->count}));
    }
    JAXFP8_RETURN_IF_ERROR(CheckPositiveNormal(kName, "numerator", numerator));

    params->amax = Data<float>(amax);
    params->stored = Data<float>(stored);
    params->numerator = numerator;
    params->scale = Data<float>(*scale);
    params->scale_inv = Data<float>(*scale_inv);
    return ffi::Error::Success();
  }
};

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_FFI_AMAX_TO_SCALE_H_
