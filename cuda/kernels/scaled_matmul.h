// scaled_matmul: out [g, m, n] = (a [g, m, k] @ b [g, n, k]^T) * a_scale_inv * b_scale_inv (+ bias) (+ accumulator).
// block_scaled_matmul: the same with scales of rows or blocks, and nothing added.
#ifndef JAXFP8_CUDA_KERNELS_SCALED_MATMUL_H_
#define JAXFP8_CUDA_KERNELS_SCALED_MATMUL_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <string>

#include "common/dispatch.h"
#include "cuda/kernels/scale_mode.h"

namespace jaxfp8::cuda {

struct ScaledMatmulParams {
  Dtype a_dtype;    // e4m3 or e5m2
  Dtype b_dtype;    // e4m3 or e5m2, not both e5m2
  Dtype out_dtype;  // bf16, f16 or f32
  const void* a;
  const void* b;
  const void* a_scale_inv;   // as the scale modes have them, for each batch or for all groups
  const void* b_scale_inv;
  int64_t a_scale_stride;    // bytes from one batch's scales to the next, a multiple of 16; 0: the same for all groups
  int64_t b_scale_stride;
  const void* bias;          // [n], bf16 (f16 where out is f16); or null
  const float* accumulator;  // [groups, m, n], where out is f32; may equal out; or null
  void* out;
  void* workspace;
  int64_t workspace_bytes;
  int64_t groups;
  int64_t batch;  // groups in a row that share their scales, a divisor of `groups`: one call of cuBLASLt
  int64_t m;  // m, n, k: multiples of 16
  int64_t n;
  int64_t k;
  bool precise;
  ScaleMode a_scales = ScaleMode::kTensor;
  ScaleMode b_scales = ScaleMode::kTensor;  // AreMultiplied
};

// Makes what a product needs of the current device and what allocates there, once: call it before a stream is captured.
// Returns the reason of a failure, or an empty string.
std::string PrepareScaledMatmul();

// Pointers to matrices and to the bias must be multiples of 16 bytes; scales and workspace may lie anywhere. With k = 0
// there may be no bias and no accumulator, and out is zeros. Returns the reason of a failure, or an empty string.
std::string LaunchScaledMatmul(const ScaledMatmulParams& params, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_SCALED_MATMUL_H_
