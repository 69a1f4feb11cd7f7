// The next amax histories and scales of many quantizers, from what a step recorded, in one launch.
#ifndef JAXFP8_CUDA_KERNELS_WRITE_HISTORIES_H_
#define JAXFP8_CUDA_KERNELS_WRITE_HISTORIES_H_

#include <cuda_runtime_api.h>

#include "common/histories.h"

namespace jaxfp8::cuda {

// A next history may be the history; no other result may overlap an operand.
cudaError_t LaunchWriteHistories(const WriteHistoriesParams& params, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_WRITE_HISTORIES_H_
