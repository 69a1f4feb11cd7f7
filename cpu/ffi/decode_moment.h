// jaxfp8_decode_moment_v1: data e4m3 [g, n], amax f32 [g, ceil(n / 128)], exponent s8 of that shape -> out f32 [g, n].
#ifndef JAXFP8_CPU_FFI_DECODE_MOMENT_H_
#define JAXFP8_CPU_FFI_DECODE_MOMENT_H_

#include <cstdint>
#include <utility>

#include "common/ffi/checks.h"
#include "common/ffi/encode_moment.h"
#include "common/params.h"

namespace jaxfp8::cpu {

struct DecodeMomentOp {
  static constexpr char kName[] = "decode_moment";
  using Params = DecodeMomentParams;

  template <class Binding>
  static auto Bind(Binding context) {
    return std::move(context)
        .template Arg<ffi::AnyBuffer>()  // data
        .template Arg<ffi::AnyBuffer>()  // amax
        .template Arg<ffi::AnyBuffer>()  // exponent
        .template Ret<ffi::AnyBuffer>()  // out
        .Attrs();
  }

  static ffi::Error ToParams(ffi::AnyBuffer data, ffi::AnyBuffer amax, ffi::AnyBuffer exponent,
                             ffi::Result<ffi::AnyBuffer> out, ffi::Dictionary attributes, Params* params) {
    JAXFP8_RETURN_IF_ERROR(CheckNoAttributes(kName, attributes));
    const MomentBuffers moment = {{kName, "data", data}, {kName, "amax", amax}, {kName, "exponent", exponent}};
    JAXFP8_RETURN_IF_ERROR(CheckInput(moment.data, 2));
    JAXFP8_RETURN_IF_ERROR(moment.Check(moment.data));
    const int64_t g = data.dimensions()[0], n = data.dimensions()[1];
    JAXFP8_RETURN_IF_ERROR(CheckArray({kName, "out", *out}, ffi::DataType::F32, {g, n}));
    *params = {Data<const uint8_t>(data), Data<const float>(amax), Data<const int8_t>(exponent), Data<float>(*out), g,
               n};
    return ffi::Error::Success();
  }
};

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_FFI_DECODE_MOMENT_H_
