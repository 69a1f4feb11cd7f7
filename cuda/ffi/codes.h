// The results that the fused producers share: data fp8 [g, m, n], amax f32 [g], and, if there is a third, data_t.
#ifndef JAXFP8_CUDA_FFI_CODES_H_
#define JAXFP8_CUDA_FFI_CODES_H_

#include <cstdint>
#include <string>

#include "cuda/ffi/support.h"

namespace jaxfp8::cuda {

struct Codes {
  void* data;
  void* data_t;  // null: not wanted
  float* amax;
};

inline ffi::Error CheckCodes(const char* op, ffi::AnyBuffer data, ffi::AnyBuffer amax, ffi::RemainingRets& rest,
                             int64_t groups, int64_t m, int64_t n, Codes* codes) {
  const Operand data_operand{op, "data", data};
  JAXFP8_RETURN_IF_ERROR(CheckFp8(data_operand));
  JAXFP8_RETURN_IF_ERROR(CheckShape(data_operand, {groups, m, n}));
  JAXFP8_RETURN_IF_ERROR(CheckAmax({op, "amax", amax}, groups));
  *codes = {data.untyped_data(), nullptr, static_cast<float*>(amax.untyped_data())};
  if (rest.size() > 1) {
    return ffi::Error::InvalidArgument(std::string(op) + ": expected 2 or 3 results, got " +
                                       std::to_string(2 + rest.size()));
  }
  if (rest.size() == 1) {
    auto data_t = rest.get<ffi::AnyBuffer>(0);
    if (!data_t.has_value()) return data_t.error();
    const Operand data_t_operand{op, "data_t", **data_t};
    JAXFP8_RETURN_IF_ERROR(CheckDtype(data_t_operand, {data.element_type()}));
    JAXFP8_RETURN_IF_ERROR(CheckShape(data_t_operand, {groups, n, m}));
    codes->data_t = (*data_t)->untyped_data();
  }
  return ffi::Error::Success();
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_FFI_CODES_H_
