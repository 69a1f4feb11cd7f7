// jaxfp8_transpose_blocks_v1: data fp8 [g, m, n], scale_inv u8 [g, m, ceil(n / c)] -> data_t [g, n, m],
// scale_inv_t u8 [g, n, ceil(m / c)].
//
// Scales are codes of E8M0, one for c elements of a row: `block`, s64.
#ifndef JAXFP8_COMMON_FFI_TRANSPOSE_BLOCKS_H_
#define JAXFP8_COMMON_FFI_TRANSPOSE_BLOCKS_H_

#include <cstdint>
#include <string>
#include <utility>

#include "common/ffi/checks.h"
#include "common/params.h"

namespace jaxfp8 {

struct TransposeBlocksOp {
  static constexpr char kName[] = "transpose_blocks";
  using Params = TransposeBlocksParams;

  template <class Binding>
  static auto Bind(Binding context) {
    return std::move(context)
        .template Arg<ffi::AnyBuffer>()  // data
        .template Arg<ffi::AnyBuffer>()  // scale_inv
        .template Ret<ffi::AnyBuffer>()  // data_t
        .template Ret<ffi::AnyBuffer>()  // scale_inv_t
        .template Attr<int64_t>("block");
  }

  static ffi::Error ToParams(ffi::AnyBuffer data, ffi::AnyBuffer scale_inv, ffi::Result<ffi::AnyBuffer> data_t,
                             ffi::Result<ffi::AnyBuffer> scale_inv_t, int64_t block, Params* params) {
    if (block < 1) {
      return ffi::Error::InvalidArgument(std::string(kName) + ": block: expected at least 1, got " +
                                         std::to_string(block));
    }
    const Operand data_operand{kName, "data", data};
    JAXFP8_RETURN_IF_ERROR(CheckFp8(data_operand));
    JAXFP8_RETURN_IF_ERROR(CheckInput(data_operand, 3));
    const int64_t g = data.dimensions()[0], m = data.dimensions()[1], n = data.dimensions()[2];
    const auto blocks = [block](int64_t size) { return size / block + (size % block != 0); };
    JAXFP8_RETURN_IF_ERROR(CheckArray({kName, "scale_inv", scale_inv}, ffi::DataType::U8, {g, m, blocks(n)}));
    JAXFP8_RETURN_IF_ERROR(CheckArray({kName, "data_t", *data_t}, data.element_type(), {g, n, m}));
    JAXFP8_RETURN_IF_ERROR(CheckArray({kName, "scale_inv_t", *scale_inv_t}, ffi::DataType::U8, {g, n, blocks(m)}));
    *params = {ToDtype(data.element_type()), Data<const uint8_t>(data),    Data<const uint8_t>(scale_inv),
               Data<uint8_t>(*data_t),       Data<uint8_t>(*scale_inv_t), block, g, m, n};
    return ffi::Error::Success();
  }
};

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_FFI_TRANSPOSE_BLOCKS_H_
