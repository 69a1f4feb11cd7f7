// dequantize: FP8 `[groups, size]` to a high-precision type.
#ifndef JAXFP8_CUDA_KERNELS_DEQUANTIZE_H_
#define JAXFP8_CUDA_KERNELS_DEQUANTIZE_H_

#include <cuda_runtime_api.h>

#include "common/params.h"

namespace jaxfp8::cuda {

cudaError_t LaunchDequantize(const DequantizeParams& params, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_DEQUANTIZE_H_
