// The names of the activation functions; activation.h computes them.
#ifndef JAXFP8_CUDA_COMMON_ACTIVATIONS_H_
#define JAXFP8_CUDA_COMMON_ACTIVATIONS_H_

#include <cstdint>

namespace jaxfp8::cuda {

enum class Activation : int32_t { kGelu, kSilu, kRelu, kSiluGated, kGeluGated };

constexpr bool IsGated(Activation activation) {
  return activation == Activation::kSiluGated || activation == Activation::kGeluGated;
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_COMMON_ACTIVATIONS_H_
