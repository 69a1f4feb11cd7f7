// jaxfp8_encode_moment_v1: data e4m3 [g, n], amax f32 [g, ceil(n / 128)], exponent s8 of the same shape, after f32
// [g, n], keys u32 of the shape of amax, or [0] -> data, amax, exponent.
#ifndef JAXFP8_COMMON_FFI_ENCODE_MOMENT_H_
#define JAXFP8_COMMON_FFI_ENCODE_MOMENT_H_

#include <cstdint>
#include <utility>

#include "common/ffi/checks.h"
#include "common/moment.h"
#include "common/params.h"

namespace jaxfp8 {

// A moment, an operand or a result.
struct MomentBuffers {
  Operand data, amax, exponent;

  // The data are of the shape of `like`, which has passed CheckInput.
  ffi::Error Check(const Operand& like) const {
    const int64_t g = like.buffer.dimensions()[0], n = like.buffer.dimensions()[1];
    const int64_t across = n / kMomentBlock + (n % kMomentBlock != 0);
    JAXFP8_RETURN_IF_ERROR(CheckArray(data, ffi::DataType::F8E4M3FN, {g, n}));
    JAXFP8_RETURN_IF_ERROR(CheckArray(amax, ffi::DataType::F32, {g, across}));
    return CheckArray(exponent, ffi::DataType::S8, {g, across});
  }
};

struct EncodeMomentOp {
  static constexpr char kName[] = "encode_moment";
  using Params = EncodeMomentParams;

  template <class Binding>
  static auto Bind(Binding context) {
    return std::move(context)
        .template Arg<ffi::AnyBuffer>()  // data
        .template Arg<ffi::AnyBuffer>()  // amax
        .template Arg<ffi::AnyBuffer>()  // exponent
        .template Arg<ffi::AnyBuffer>()  // after
        .template Arg<ffi::AnyBuffer>()  // keys
        .template Ret<ffi::AnyBuffer>()  // next data
        .template Ret<ffi::AnyBuffer>()  // next amax
        .template Ret<ffi::AnyBuffer>()  // next exponent
        .template Attr<bool>("squared");
  }

  static ffi::Error ToParams(ffi::AnyBuffer data, ffi::AnyBuffer amax, ffi::AnyBuffer exponent, ffi::AnyBuffer after,
                             ffi::AnyBuffer keys, ffi::Result<ffi::AnyBuffer> next_data,
                             ffi::Result<ffi::AnyBuffer> next_amax, ffi::Result<ffi::AnyBuffer> next_exponent,
                             bool squared, Params* params) {
    const MomentBuffers moment = {{kName, "data", data}, {kName, "amax", amax}, {kName, "exponent", exponent}};
    const MomentBuffers next = {
        {kName, "next data", *next_data}, {kName, "next amax", *next_amax}, {kName, "next exponent", *next_exponent}};
    JAXFP8_RETURN_IF_ERROR(CheckInput(moment.data, 2));
    JAXFP8_RETURN_IF_ERROR(moment.Check(moment.data));
    const int64_t g = data.dimensions()[0], n = data.dimensions()[1];
    JAXFP8_RETURN_IF_ERROR(CheckArray({kName, "after", after}, ffi::DataType::F32, {g, n}));
    const ffi::Span<const int64_t> of_keys = IsNone(keys) ? keys.dimensions() : amax.dimensions();
    JAXFP8_RETURN_IF_ERROR(CheckArray({kName, "keys", keys}, ffi::DataType::U32, of_keys));
    JAXFP8_RETURN_IF_ERROR(next.Check(moment.data));
    *params = {Data<const uint8_t>(data), Data<const float>(amax), Data<const int8_t>(exponent),
               Data<const float>(after), IsNone(keys) ? nullptr : Data<const uint32_t>(keys), squared,
               Data<uint8_t>(*next_data), Data<float>(*next_amax), Data<int8_t>(*next_exponent), g, n};
    return ffi::Error::Success();
  }
};

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_FFI_ENCODE_MOMENT_H_
