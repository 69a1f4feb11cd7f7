// transpose_blocks: blocks along the rows of FP8 codes become blocks along their columns; exponents are shifted.
#ifndef JAXFP8_CUDA_KERNELS_TRANSPOSE_BLOCKS_H_
#define JAXFP8_CUDA_KERNELS_TRANSPOSE_BLOCKS_H_

#include <cuda_runtime_api.h>

#include "common/params.h"

namespace jaxfp8::cuda {

cudaError_t LaunchTransposeBlocks(const TransposeBlocksParams& params, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_TRANSPOSE_BLOCKS_H_
