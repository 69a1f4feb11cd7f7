// The scales of several quantizers from their amax histories, and the histories moved one step, in one launch.
#ifndef JAXFP8_CUDA_KERNELS_DELAYED_SCALES_H_
#define JAXFP8_CUDA_KERNELS_DELAYED_SCALES_H_

#include <cuda_runtime_api.h>

#include "common/histories.h"

namespace jaxfp8::cuda {

// No result may overlap an operand.
cudaError_t LaunchDelayedScales(const DelayedScalesParams& params, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_DELAYED_SCALES_H_
