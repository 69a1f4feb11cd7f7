// quantize_transpose: `[groups, m, n]` to FP8 in both layouts, and each group's amax raised by its own.
#ifndef JAXFP8_CUDA_KERNELS_QUANTIZE_TRANSPOSE_H_
#define JAXFP8_CUDA_KERNELS_QUANTIZE_TRANSPOSE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dispatch.h"

namespace jaxfp8::cuda {

struct QuantizeTransposeParams {
  Dtype dtype;               // of x: bf16, f16 or f32
  Dtype format;              // of data and data_t: e4m3 or e5m2
  const void* x;             // [groups, m, n]
  const float* scale;        // [1] or [groups]
  int64_t scale_stride;      // 0 or 1
  void* data;                // [groups, m, n]
  void* data_t;              // [groups, n, m]
  const float* amax_so_far;  // null, or [groups], not negative
  float* amax;               // null, or [groups]: raised, from what it is so far; may be the same buffer
  float* column_sums;        // null, or [groups, ColumnSumParts(m), n]: the sums of x over 128 rows each
  int64_t groups;
  int64_t m;
  int64_t n;
};

cudaError_t LaunchQuantizeTranspose(const QuantizeTransposeParams& params, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_QUANTIZE_TRANSPOSE_H_
