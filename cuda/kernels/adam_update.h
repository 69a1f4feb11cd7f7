// adam_update: a step of Adam on up to 16 leaves whose moments are in FP8, in one launch, in place or not.
#ifndef JAXFP8_CUDA_KERNELS_ADAM_UPDATE_H_
#define JAXFP8_CUDA_KERNELS_ADAM_UPDATE_H_

#include <cuda_runtime_api.h>

#include "common/adam.h"

namespace jaxfp8::cuda {

cudaError_t LaunchAdamUpdate(const AdamUpdateParams& params, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_ADAM_UPDATE_H_
