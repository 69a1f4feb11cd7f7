// quantize_transpose: `[groups, m, n]` to FP8 in both layouts, and each group's amax raised by its own.
// quantize_pair: two such matrices, side by side.
#ifndef JAXFP8_CUDA_KERNELS_QUANTIZE_TRANSPOSE_H_
#define JAXFP8_CUDA_KERNELS_QUANTIZE_TRANSPOSE_H_

#include <cuda_runtime_api.h>

#include "common/params.h"

namespace jaxfp8::cuda {

cudaError_t LaunchQuantizeTranspose(const QuantizeTransposeParams& params, cudaStream_t stream);

// data is [groups, m, 2, n], data_t [groups, 2, n, m]; x comes first.
struct QuantizePairParams : TileParams {
  const void* second;  // as x
};

cudaError_t LaunchQuantizePair(const QuantizePairParams& params, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_QUANTIZE_TRANSPOSE_H_
