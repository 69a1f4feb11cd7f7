// jaxfp8_quantize_transpose_v3: x [g, m, n], scale, amax_so_far f32 [1] or [g] -> data [g, m, n],
// data_t [g, n, m], amax as amax_so_far; and, if a fourth result is asked for, column_sums f32 [g, ceil(m / 128), n].
//
// The amax is as that of jaxfp8_quantize_v3. Matrices and column_sums may lack g where it is 1.
#ifndef JAXFP8_COMMON_FFI_QUANTIZE_TRANSPOSE_H_
#define JAXFP8_COMMON_FFI_QUANTIZE_TRANSPOSE_H_

#include <string>
#include <utility>

#include "common/ffi/quantize_checks.h"

namespace jaxfp8 {

struct QuantizeTransposeOp {
  static constexpr char kName[] = "quantize_transpose";
  using Params = QuantizeTransposeParams;

  template <class Binding>
  static auto Bind(Binding context) {
    return std::move(context)
        .template Arg<ffi::AnyBuffer>()  // x
        .template Arg<ffi::AnyBuffer>()  // scale
        .template Arg<ffi::AnyBuffer>()  // amax_so_far
        .template Ret<ffi::AnyBuffer>()  // data
        .template Ret<ffi::AnyBuffer>()  // data_t
        .template Ret<ffi::AnyBuffer>()  // amax
        .RemainingRets()                 // column_sums
        .Attrs();
  }

  static ffi::Error ToParams(ffi::AnyBuffer x, ffi::AnyBuffer scale, ffi::AnyBuffer amax_so_far,
                             ffi::Result<ffi::AnyBuffer> data, ffi::Result<ffi::AnyBuffer> data_t,
                             ffi::Result<ffi::AnyBuffer> amax, ffi::RemainingRets rest, ffi::Dictionary attributes,
                             Params* params) {
    JAXFP8_RETURN_IF_ERROR(CheckNoAttributes(kName, attributes));
    const Operand x_operand{kName, "x", x};
    JAXFP8_RETURN_IF_ERROR(CheckHighPrecision(x_operand));
    JAXFP8_RETURN_IF_ERROR(CheckMatrices(x_operand));
    const auto [groups, m, n] = MatrixDims(x);
    params->m = m;
    params->n = n;
    JAXFP8_RETURN_IF_ERROR(ToQuantized(kName, x, scale, amax_so_far, *data, *amax, {groups, m, n}, params));
    JAXFP8_RETURN_IF_ERROR(ToTransposed(kName, *data, *data_t, params));
    params->column_sums = nullptr;
    if (rest.size() == 0) return ffi::Error::Success();
    if (rest.size() > 1) {
      return ffi::Error::InvalidArgument(std::string(kName) + ": expected 3 or 4 results, got " +
                                         std::to_string(3 + rest.size()));
    }
    return ToColumnSums(kName, **rest.get<ffi::AnyBuffer>(0), *data, &params->column_sums);
  }
};

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_FFI_QUANTIZE_TRANSPOSE_H_
