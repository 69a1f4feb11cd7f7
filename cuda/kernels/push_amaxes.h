// Slot 0 of the amax histories of several quantizers set, in place where XLA lets it, in one launch.
#ifndef JAXFP8_CUDA_KERNELS_PUSH_AMAXES_H_
#define JAXFP8_CUDA_KERNELS_PUSH_AMAXES_H_

#include <cuda_runtime_api.h>

#include "common/histories.h"

namespace jaxfp8::cuda {

cudaError_t LaunchPushAmaxes(const PushAmaxesParams& params, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_PUSH_AMAXES_H_
