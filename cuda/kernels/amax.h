// amax of each group of `[groups, size]`.
#ifndef JAXFP8_CUDA_KERNELS_AMAX_H_
#define JAXFP8_CUDA_KERNELS_AMAX_H_

#include <cuda_runtime_api.h>

#include "common/params.h"

namespace jaxfp8::cuda {

cudaError_t LaunchAmax(const AmaxParams& params, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_AMAX_H_
