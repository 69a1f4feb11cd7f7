// quantize_norm: RMSNorm or LayerNorm of `[groups, m, n]` to FP8, in one or both layouts, with its amax.
#ifndef JAXFP8_CUDA_KERNELS_QUANTIZE_NORM_H_
#define JAXFP8_CUDA_KERNELS_QUANTIZE_NORM_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dispatch.h"

namespace jaxfp8::cuda {

struct QuantizeNormParams {
  Dtype dtype;               // of x: bf16, f16 or f32
  Dtype format;              // of data and data_t: e4m3 or e5m2
  bool centered;             // LayerNorm: minus the mean; else RMSNorm
  float epsilon;
  const void* x;             // [groups, m, n]
  const float* scale;        // [1] or [groups]
  int64_t scale_stride;      // 0 or 1
  const float* amax_so_far;      // [groups]: what amax starts from; may be amax
  const float* gamma;        // [1, n] or [groups, n]
  const float* beta;         // as gamma, or null
  int64_t parameter_stride;  // 0 or n
  void* data;                // [groups, m, n]
  void* data_t;              // [groups, n, m], or null
  float* amax;               // [groups]
  int64_t groups;
  int64_t m;
  int64_t n;
};

cudaError_t LaunchQuantizeNorm(const QuantizeNormParams& params, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_QUANTIZE_NORM_H_
