// quantize_activation_grad: the gradient of an activation of `[groups, m, (2,) n]` to FP8, in one or both layouts, with its
// amax and the sums of its columns.
#ifndef JAXFP8_CUDA_KERNELS_QUANTIZE_ACTIVATION_GRAD_H_
#define JAXFP8_CUDA_KERNELS_QUANTIZE_ACTIVATION_GRAD_H_

#include <cuda_runtime_api.h>

#include "common/params.h"
#include "cuda/common/activations.h"

namespace jaxfp8::cuda {

// x: [groups, m, n]; gated [groups, m, 2, n], and so is data; data_t is then [groups, 2, n, m] and the sums are
// [groups, ColumnSumParts(m), 2, n].
struct QuantizeActivationGradParams : QuantizeTransposeParams {
  const void* grad;  // [groups, m, n], of x's dtype
  Activation activation;
  ClampParams clamp;
};

cudaError_t LaunchQuantizeActivationGrad(const QuantizeActivationGradParams& params, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_QUANTIZE_ACTIVATION_GRAD_H_
