// What the ops of an activation share: its name, and of clamped_swiglu its numbers, as attributes, and x
// [g, m, 1 or 2, n].
#ifndef JAXFP8_CUDA_FFI_ACTIVATIONS_H_
#define JAXFP8_CUDA_FFI_ACTIVATIONS_H_

#include <string>
#include <string_view>

#include "common/ffi/checks.h"
#include "cuda/common/activations.h"

namespace jaxfp8::cuda {

inline bool ToActivation(std::string_view name, Activation* activation) {
  constexpr std::string_view kNames[] = {"gelu",       "silu",         "relu",          "silu_gated",
                                         "gelu_gated", "relu_squared", "clamped_swiglu"};
  for (int i = 0; i < 7; ++i) {
    *activation = static_cast<Activation>(i);
    if (name == kNames[i]) return true;
  }
  return false;
}

inline ffi::Error ReadNumber(const ffi::Dictionary& attributes, std::string_view name, float* number) {
  const ffi::ErrorOr<float> read = attributes.get<float>(name);
  if (read.has_error()) return read.error();
  *number = *read;
  return ffi::Error::Success();
}

// Reads the attributes into the params of an op, and checks x for them.
template <class Params>
ffi::Error CheckActivation(const char* op, ffi::AnyBuffer x, const ffi::Dictionary& attributes, Params* params) {
  const ffi::ErrorOr<std::string_view> name = attributes.get<std::string_view>("activation");
  if (name.has_error()) return name.error();
  if (!ToActivation(*name, &params->activation)) {
    return ffi::Error::InvalidArgument(std::string(op) + ": activation: expected gelu, silu, relu, silu_gated, " +
                                       "gelu_gated, relu_squared or clamped_swiglu, got " + std::string(*name));
  }
  const bool is_clamped = params->activation == Activation::kClampedSwiGlu;
  if (attributes.size() != (is_clamped ? 4u : 1u)) {
    return ffi::Error::InvalidArgument(std::string(op) + ": expected the attribute activation" +
                                       (is_clamped ? ", limit, alpha and offset" : " alone") + ", got " +
                                       std::to_string(attributes.size()));
  }
  if (is_clamped) {
    JAXFP8_RETURN_IF_ERROR(ReadNumber(attributes, "limit", &params->clamp.limit));
    JAXFP8_RETURN_IF_ERROR(ReadNumber(attributes, "alpha", &params->clamp.alpha));
    JAXFP8_RETURN_IF_ERROR(ReadNumber(attributes, "offset", &params->clamp.offset));
  }
  const Operand operand{op, "x", x};
  JAXFP8_RETURN_IF_ERROR(CheckHighPrecision(operand));
  JAXFP8_RETURN_IF_ERROR(CheckInput(operand, 4));
  const ffi::Span<const int64_t> dims = x.dimensions();
  return CheckShape(operand, {dims[0], dims[1], IsGated(params->activation) ? 2 : 1, dims[3]});
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_FFI_ACTIVATIONS_H_
