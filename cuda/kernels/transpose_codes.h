// transpose_codes: FP8 codes `[groups, m, n]` as `[groups, n, m]`.
#ifndef JAXFP8_CUDA_KERNELS_TRANSPOSE_CODES_H_
#define JAXFP8_CUDA_KERNELS_TRANSPOSE_CODES_H_

#include <cuda_runtime_api.h>

#include "common/params.h"

namespace jaxfp8::cuda {

cudaError_t LaunchTransposeCodes(const TransposeCodesParams& params, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_TRANSPOSE_CODES_H_
