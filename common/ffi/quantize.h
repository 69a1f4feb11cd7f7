// jaxfp8_quantize_v3: x [g, n], scale, amax_so_far f32 [1] or [g] -> data fp8 [g, n], amax as amax_so_far.
//
// The amax is raised in place where XLA aliases the two; elsewhere it starts as a copy. An amax_so_far of f32 [0] means
// zeros; an amax of f32 [0] means that nobody wants it.
#ifndef JAXFP8_COMMON_FFI_QUANTIZE_H_
#define JAXFP8_COMMON_FFI_QUANTIZE_H_

#include <utility>

#include "common/ffi/quantize_checks.h"

namespace jaxfp8 {

struct QuantizeOp {
  static constexpr char kName[] = "quantize";
  using Params = QuantizeParams;

  template <class Binding>
  static auto Bind(Binding context) {
    return std::move(context)
        .template Arg<ffi::AnyBuffer>()  // x
        .template Arg<ffi::AnyBuffer>()  // scale
        .template Arg<ffi::AnyBuffer>()  // amax_so_far
        .template Ret<ffi::AnyBuffer>()  // data
        .template Ret<ffi::AnyBuffer>()  // amax
        .Attrs();
  }

  static ffi::Error ToParams(ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer amax_so_far,
                             ffi::Result<ffi::AnyBuffer> data, ffi::Result<ffi::AnyBuffer> amax,
                             ffi::Dictionary attributes, Params* params) {
    JAXFP8_RETURN_IF_ERROR(CheckNoAttributes(kName, attributes));
    const Operand x_operand{kName, "x", x};
    JAXFP8_RETURN_IF_ERROR(CheckHighPrecision(x_operand));
    JAXFP8_RETURN_IF_ERROR(CheckInput(x_operand, 2));
    params->size = x.dimensions()[1];
    return ToQuantized(kName, x, scale, amax_so_far, *data, *amax, {x.dimensions()[0], params->size}, params);
  }
};

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_FFI_QUANTIZE_H_
