// amax of each group of `[groups, size]`.
#ifndef JAXFP8_CUDA_KERNELS_AMAX_H_
#define JAXFP8_CUDA_KERNELS_AMAX_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dispatch.h"

namespace jaxfp8::cuda {

struct AmaxParams {
  Dtype dtype;    // of x: bf16, f16 or f32
  const void* x;  // [groups, size]
  float* amax;    // [groups]
  int64_t groups;
  int64_t size;
};

cudaError_t LaunchAmax(const AmaxParams& params, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_AMAX_H_
