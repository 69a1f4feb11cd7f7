// What a step needs of the amax histories and scales of many quantizers, in one launch.
#ifndef JAXFP8_CUDA_KERNELS_READ_HISTORIES_H_
#define JAXFP8_CUDA_KERNELS_READ_HISTORIES_H_

#include <cuda_runtime_api.h>

#include "common/histories.h"

namespace jaxfp8::cuda {

// No result may overlap an operand.
cudaError_t LaunchReadHistories(const ReadHistoriesParams& params, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_READ_HISTORIES_H_
