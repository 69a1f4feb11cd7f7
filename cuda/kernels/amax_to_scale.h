// scale and scale_inv of each amax, or of the stored scale_inv where there is no amax.
#ifndef JAXFP8_CUDA_KERNELS_AMAX_TO_SCALE_H_
#define JAXFP8_CUDA_KERNELS_AMAX_TO_SCALE_H_

#include <cuda_runtime_api.h>

#include "common/params.h"

namespace jaxfp8::cuda {

cudaError_t LaunchAmaxToScale(const AmaxToScaleParams& params, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_AMAX_TO_SCALE_H_
