// jaxfp8_dequantize_v1: data fp8 [g, ...], scale_inv f32 [1] or [g] -> out of that shape.
#ifndef JAXFP8_COMMON_FFI_DEQUANTIZE_H_
#define JAXFP8_COMMON_FFI_DEQUANTIZE_H_

#include <utility>

#include "common/ffi/checks.h"
#include "common/params.h"

namespace jaxfp8 {

struct DequantizeOp {
  static constexpr char kName[] = "dequantize";
  using Params = DequantizeParams;

  template <class Binding>
  static auto Bind(Binding context) {
    return std::move(context)
        .template Arg<ffi::AnyBuffer>()  // data
        .template Arg<ffi::AnyBuffer>()  // scale_inv
        .template Ret<ffi::AnyBuffer>()  // out
        .Attrs();
  }

  static ffi::Error ToParams(ffi::AnyBuffer data, ffi::AnyBuffer scale_inv, ffi::Result<ffi::AnyBuffer> out,
                             ffi::Dictionary attributes, Params* params) {
    JAXFP8_RETURN_IF_ERROR(CheckNoAttributes(kName, attributes));
    const Operand data_operand{kName, "data", data};
    const Operand out_operand{kName, "out", *out};
    JAXFP8_RETURN_IF_ERROR(CheckFp8(data_operand));
    if (data.dimensions().size() < 2) return Mismatch(data_operand, "rank 2 or more");
    JAXFP8_RETURN_IF_ERROR(CheckSize(data_operand, sizeof(float)));
    params->groups = data.dimensions()[0];
    params->size = params->groups == 0 ? 0 : static_cast<int64_t>(data.element_count()) / params->groups;
    JAXFP8_RETURN_IF_ERROR(CheckScale({kName, "scale_inv", scale_inv}, params->groups));
    JAXFP8_RETURN_IF_ERROR(CheckHighPrecision(out_operand));
    JAXFP8_RETURN_IF_ERROR(CheckShape(out_operand, data.dimensions()));

    params->format = ToDtype(data.element_type());
    params->dtype = ToDtype(out->element_type());
    params->data = data.untyped_data();
    params->scale_inv = Data<float>(scale_inv);
    params->scale_stride = ScaleStride(scale_inv);
    params->out = out->untyped_data();
    return ffi::Error::Success();
  }
};

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_FFI_DEQUANTIZE_H_
