// What the handlers of both libraries have in common that quantize blocks.
#ifndef JAXFP8_COMMON_FFI_BLOCK_CHECKS_H_
#define JAXFP8_COMMON_FFI_BLOCK_CHECKS_H_

#include <string>
#include <string_view>

#include "common/block_scale.h"
#include "common/ffi/checks.h"

namespace jaxfp8 {

inline ffi::Error UnknownAttribute(const char* op, const char* name, const char* expected, std::string_view got) {
  return ffi::Error::InvalidArgument(std::string(op) + ": " + name + ": expected " + expected + ", got " +
                                     std::string(got));
}

// Sets `scaling` from an attribute of that name.
inline ffi::Error ToBlockScaling(const char* op, std::string_view name, BlockScaling* scaling) {
  if (name == "f32") {
    *scaling = BlockScaling::kF32;
  } else if (name == "f32_power_2") {
    *scaling = BlockScaling::kF32PowerOf2;
  } else if (name == "e8m0_ceil") {
    *scaling = BlockScaling::kE8M0Ceil;
  } else if (name == "e8m0_floor") {
    *scaling = BlockScaling::kE8M0Floor;
  } else {
    return UnknownAttribute(op, "scaling", "f32, f32_power_2, e8m0_ceil or e8m0_floor", name);
  }
  return ffi::Error::Success();
}

// The dtype of scale_invs: F32, or U8 for the codes of E8M0.
inline ffi::Error CheckBlockScales(const Operand& scale_inv, BlockScaling scaling,
                                   std::initializer_list<int64_t> dims) {
  return CheckArray(scale_inv, IsE8M0(scaling) ? ffi::DataType::U8 : ffi::DataType::F32, dims);
}

// The results that some calls have beside three or two others: data_t and scale_inv_t, or neither.
inline ffi::Error CheckTransposedCount(const char* op, int64_t first, int64_t rest) {
  if (rest == 0 || rest == 2) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(std::string(op) + ": expected " + std::to_string(first) + " or " +
                                     std::to_string(first + 2) + " results, got " + std::to_string(first + rest));
}

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_FFI_BLOCK_CHECKS_H_
