// ragged_matmul: products of consecutive groups of rows, each with a matrix of its own; or groups of the contraction.
#ifndef JAXFP8_CUDA_KERNELS_RAGGED_MATMUL_H_
#define JAXFP8_CUDA_KERNELS_RAGGED_MATMUL_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dispatch.h"
#include "cuda/common/ragged_plan.h"

namespace jaxfp8::cuda {

struct RaggedMatmulParams {
  RaggedPlan plan;
  Dtype a_dtype;    // e4m3 or e5m2
  Dtype b_dtype;    // e4m3 or e5m2
  Dtype out_dtype;  // bf16, f16 or f32
  const void* a;
  const void* b;
  // [1] or [members]. With `blocks` one for each block of 128 elements of the contraction: of a, and of b where the groups cut
  // the contraction, for each row, [members, blocks, rows or columns]; of other b for each 128 columns,
  // [members, groups, columns / 128, blocks].
  const float* a_scale_inv;
  const float* b_scale_inv;
  int64_t a_scale_stride;      // 0 or 1, without `blocks`
  int64_t b_scale_stride;      // 0 or 1, without `blocks`
  const int32_t* group_sizes;  // [members, groups], on the device
  void* out;  // [members, rows, columns]; where the groups cut the contraction, [members, groups, rows, columns]
  bool precise;
  bool blocks;  // compute capability 9.0 only; always precise
  bool tma;     // by LaunchRaggedTma, where it is supported
};

cudaError_t LaunchRaggedMatmul(const RaggedMatmulParams& params, cudaStream_t stream);

// The same bits by the kernel of ragged_tma.cu; cudaErrorNotSupported where it does not have these operands.
cudaError_t LaunchRaggedTma(const RaggedMatmulParams& params, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_RAGGED_MATMUL_H_
