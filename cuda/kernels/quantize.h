// quantize: `[groups, size]` to FP8, and each group's amax raised by its own.
#ifndef JAXFP8_CUDA_KERNELS_QUANTIZE_H_
#define JAXFP8_CUDA_KERNELS_QUANTIZE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dispatch.h"

namespace jaxfp8::cuda {

struct QuantizeParams {
  Dtype dtype;               // of x: bf16, f16 or f32
  Dtype format;              // of data: e4m3 or e5m2
  const void* x;             // [groups, size]
  const float* scale;        // [1] or [groups]
  int64_t scale_stride;      // 0 or 1
  void* data;                // [groups, size]
  const float* amax_so_far;  // [groups], not negative; or null: 0
  float* amax;               // [groups]: raised, from what it is so far; may be the same buffer. Null: not wanted
  int64_t groups;
  int64_t size;
};

cudaError_t LaunchQuantize(const QuantizeParams& params, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_QUANTIZE_H_
