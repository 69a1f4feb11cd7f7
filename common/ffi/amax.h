// jaxfp8_amax_v1: x [g, n] -> amax f32 [g].
#ifndef JAXFP8_COMMON_FFI_AMAX_H_
#define JAXFP8_COMMON_FFI_AMAX_H_

#include <utility>

#include "common/ffi/checks.h"
#include "common/params.h"

namespace jaxfp8 {

struct AmaxOp {
  static constexpr char kName[] = "amax";
  using Params = AmaxParams;

  template <class Binding>
  static auto Bind(Binding context) {
    return std::move(context)
        .template Arg<ffi::AnyBuffer>()  // x
        .template Ret<ffi::AnyBuffer>()  // amax
        .Attrs();
  }

  static ffi::Error ToParams(ffi::AnyBuffer x, ffi::Result<ffi::AnyBuffer> amax, ffi::Dictionary attributes,
                             Params* params) {
    JAXFP8_RETURN_IF_ERROR(CheckNoAttributes(kName, attributes));
    const Operand x_operand{kName, "x", x};
    JAXFP8_RETURN_IF_ERROR(CheckHighPrecision(x_operand));
    JAXFP8_RETURN_IF_ERROR(CheckInput(x_operand, 2));
    params->groups = x.dimensions()[0];
    params->size = x.dimensions()[1];
    JAXFP8_RETURN_IF_ERROR(CheckArray({kName, "amax", *amax}, ffi::DataType::F32, {params->groups}));

    params->dtype = ToDtype(x.element_type());
    params->x = x.untyped_data();
    params->amax = Data<float>(*amax);
    return ffi::Error::Success();
  }
};

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_FFI_AMAX_H_
