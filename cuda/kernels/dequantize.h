// dequantize: FP8 `[groups, size]` to a high-precision type.
#ifndef JAXFP8_CUDA_KERNELS_DEQUANTIZE_H_
#define JAXFP8_CUDA_KERNELS_DEQUANTIZE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dispatch.h"

namespace jaxfp8::cuda {

struct DequantizeParams {
  Dtype format;            // of data: e4m3 or e5m2
  Dtype dtype;             // of out: bf16, f16 or f32
  const void* data;        // [groups, size]
  const float* scale_inv;  // [1] or [groups]
  int64_t scale_stride;    // 0 or 1
  void* out;               // [groups, size]
  int64_t groups;
  int64_t size;
};

cudaError_t LaunchDequantize(const DequantizeParams& params, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_DEQUANTIZE_H_
