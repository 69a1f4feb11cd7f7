// What the ops of an activation share: its name as an attribute, and x [g, m, 1 or 2, n].
#ifndef JAXFP8_CUDA_FFI_ACTIVATIONS_H_
#define JAXFP8_CUDA_FFI_ACTIVATIONS_H_

#include <string>
#include <string_view>

#include "common/ffi/checks.h"
#include "cuda/common/activations.h"

namespace jaxfp8::cuda {

inline bool ToActivation(std::string_view name, Activation* activation) {
  constexpr std::string_view kNames[] = {"gelu", "silu", "relu", "silu_gated", "gelu_gated"};
  for (int i = 0; i < 5; ++i) {
    *activation = static_cast<Activation>(i);
    if (name == kNames[i]) return true;
  }
  return false;
}

// Checks the attribute and x for it.
inline ffi::Error CheckActivation(const char* op, ffi::AnyBuffer x, std::string_view name, Activation* activation) {
  if (!ToActivation(name, activation)) {
    return ffi::Error::InvalidArgument(std::string(op) + ": activation: expected gelu, silu, relu, silu_gated or " +
                                       "gelu_gated, got " + std::string(name));
  }
  const Operand operand{op, "x", x};
  JAXFP8_RETURN_IF_ERROR(CheckHighPrecision(operand));
  JAXFP8_RETURN_IF_ERROR(CheckInput(operand, 4));
  const ffi::Span<const int64_t> dims = x.dimensions();
  return CheckShape(operand, {dims[0], dims[1], IsGated(*activation) ? 2 : 1, dims[3]});
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_FFI_ACTIVATIONS_H_
