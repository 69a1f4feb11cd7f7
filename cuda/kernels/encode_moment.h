// encode_moment: quantizes the f32 elements of an optimizer's moment, in blocks of 128, in place or not.
#ifndef JAXFP8_CUDA_KERNELS_ENCODE_MOMENT_H_
#define JAXFP8_CUDA_KERNELS_ENCODE_MOMENT_H_

#include <cuda_runtime_api.h>

#include "common/params.h"

namespace jaxfp8::cuda {

cudaError_t LaunchEncodeMoment(const EncodeMomentParams& params, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_ENCODE_MOMENT_H_
