// quantize_norm: RMSNorm or LayerNorm of `[groups, m, n]` to FP8, in one or both layouts, with its amax; of rows whose
// mean and standard deviation are known.
#ifndef JAXFP8_CUDA_KERNELS_QUANTIZE_NORM_H_
#define JAXFP8_CUDA_KERNELS_QUANTIZE_NORM_H_

#include <cuda_runtime_api.h>

#include "common/params.h"

namespace jaxfp8::cuda {

// (x - mean) * (rstd * gamma) + beta, each operation rounded once but the last two, which are one.
struct QuantizeNormParams : TileParams {
  const float* statistics;   // of each row: [groups, m, 2], rstd = 1 / the standard deviation, and the mean; or rstd alone
  bool has_mean;             // LayerNorm; else RMSNorm, without a mean and a beta
  const float* gamma;        // [1, n] or [groups, n]
  const float* beta;         // as gamma, or null: nothing is added
  int64_t parameter_stride;  // 0 or n
};

cudaError_t LaunchQuantizeNorm(const QuantizeNormParams& params, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_QUANTIZE_NORM_H_
