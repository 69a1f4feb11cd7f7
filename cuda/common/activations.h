// The names of the activation functions; activation.h computes them.
#ifndef JAXFP8_CUDA_COMMON_ACTIVATIONS_H_
#define JAXFP8_CUDA_COMMON_ACTIVATIONS_H_

#include <cstdint>

namespace jaxfp8::cuda {

enum class Activation : int32_t { kGelu, kSilu, kRelu, kSiluGated, kGeluGated, kReluSquared, kClampedSwiGlu };

// The numbers of kClampedSwiGlu; other activations have none.
struct ClampParams {
  float limit, alpha, offset;
};

constexpr bool IsGated(Activation activation) {
  return activation == Activation::kSiluGated || activation == Activation::kGeluGated ||
         activation == Activation::kClampedSwiGlu;
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_COMMON_ACTIVATIONS_H_
