// quantize_activation: an activation of `[groups, m, (2,) n]` to FP8, in one or both layouts, with its amax.
#ifndef JAXFP8_CUDA_KERNELS_QUANTIZE_ACTIVATION_H_
#define JAXFP8_CUDA_KERNELS_QUANTIZE_ACTIVATION_H_

#include <cuda_runtime_api.h>

#include "common/params.h"
#include "cuda/common/activations.h"

namespace jaxfp8::cuda {

// x: [groups, m, n]; gated [groups, m, 2, n], the gate and then what it multiplies.
struct QuantizeActivationParams : TileParams {
  Activation activation;
  ClampParams clamp;
};

cudaError_t LaunchQuantizeActivation(const QuantizeActivationParams& params, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_QUANTIZE_ACTIVATION_H_
