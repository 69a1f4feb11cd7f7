// quantize_activation: an activation of `[groups, m, (2,) n]` to FP8, in one or both layouts, with its amax.
#ifndef JAXFP8_CUDA_KERNELS_QUANTIZE_ACTIVATION_H_
#define JAXFP8_CUDA_KERNELS_QUANTIZE_ACTIVATION_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dispatch.h"

namespace jaxfp8::cuda {

enum class Activation : int32_t { kGelu, kSilu, kRelu, kSiluGated, kGeluGated };

struct QuantizeActivationParams {
  Dtype dtype;            // of x: bf16, f16 or f32
  Dtype format;           // of data and data_t: e4m3 or e5m2
  Activation activation;
  const void* x;          // [groups, m, n]; gated [groups, m, 2, n]: the gate, then what it multiplies
  const float* scale;     // [1] or [groups]
  int64_t scale_stride;   // 0 or 1
  const float* amax_so_far;   // [groups]: what amax starts from; may be amax
  void* data;             // [groups, m, n]
  void* data_t;           // [groups, n, m], or null
  float* amax;            // [groups]
  int64_t groups;
  int64_t m;
  int64_t n;
};

cudaError_t LaunchQuantizeActivation(const QuantizeActivationParams& params, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_QUANTIZE_ACTIVATION_H_
