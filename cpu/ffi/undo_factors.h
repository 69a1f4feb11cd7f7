// jaxfp8_undo_factors_v1: history f32 [g, H], scale f32 [g], new history f32 [g, H], new scale f32 [g] -> amax,
//     scale_inv, stays, factor f32 [g]. Histories [H] are those of one group.
#ifndef JAXFP8_CPU_FFI_UNDO_FACTORS_H_
#define JAXFP8_CPU_FFI_UNDO_FACTORS_H_

#include <cstdint>
#include <utility>

#include "common/ffi/histories.h"
#include "cpu/kernels/undo_factors.h"

namespace jaxfp8::cpu {

struct UndoFactorsOp {
  static constexpr char kName[] = "undo_factors";
  using Params = UndoFactorsParams;
  using Result = ffi::Result<ffi::AnyBuffer>;

  template <class Binding>
  static auto Bind(Binding context) {
    return std::move(context)
        .template Arg<ffi::AnyBuffer>()  // history
        .template Arg<ffi::AnyBuffer>()  // scale
        .template Arg<ffi::AnyBuffer>()  // new history
        .template Arg<ffi::AnyBuffer>()  // new scale
        .template Ret<ffi::AnyBuffer>()  // amax
        .template Ret<ffi::AnyBuffer>()  // scale_inv
        .template Ret<ffi::AnyBuffer>()  // stays
        .template Ret<ffi::AnyBuffer>()  // factor
        .Attrs();
  }

  static ffi::Error ToParams(ffi::AnyBuffer history, ffi::AnyBuffer scale, ffi::AnyBuffer new_history,
                             ffi::AnyBuffer new_scale, Result amax, Result scale_inv, Result stays, Result factor,
                             ffi::Dictionary attributes, Params* params) {
    JAXFP8_RETURN_IF_ERROR(CheckNoAttributes(kName, attributes));
    JAXFP8_RETURN_IF_ERROR(CheckHistory({kName, "history", history}, history, &params->groups));
    const int64_t groups = params->groups;
    JAXFP8_RETURN_IF_ERROR(CheckArray({kName, "new history", new_history}, ffi::DataType::F32, history.dimensions()));
    const Operand vectors[] = {{kName, "scale", scale},          {kName, "new scale", new_scale},
                               {kName, "amax", *amax},           {kName, "scale_inv", *scale_inv},
                               {kName, "stays", *stays},         {kName, "factor", *factor}};
    for (const Operand& vector : vectors) {
      JAXFP8_RETURN_IF_ERROR(CheckArray(vector, ffi::DataType::F32, {groups}));
    }
    *params = {Data<const float>(history), Data<const float>(scale),      Data<const float>(new_history),
               Data<const float>(new_scale), Data<float>(*amax),          Data<float>(*scale_inv),
               Data<float>(*stays),          Data<float>(*factor),        groups,
               history.dimensions().back()};
    return ffi::Error::Success();
  }
};

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_FFI_UNDO_FACTORS_H_
