// quantize_transpose: `[groups, m, n]` to FP8 in both layouts, and each group's amax raised by its own.
#ifndef JAXFP8_CUDA_KERNELS_QUANTIZE_TRANSPOSE_H_
#define JAXFP8_CUDA_KERNELS_QUANTIZE_TRANSPOSE_H_

#include "cuda/kernels/tile_params.h"

namespace jaxfp8::cuda {

struct QuantizeTransposeParams : TileParams {
  float* column_sums;  // null, or [groups, ColumnSumParts(m), n]: the sums of x over 128 rows each
};

cudaError_t LaunchQuantizeTranspose(const QuantizeTransposeParams& params, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_QUANTIZE_TRANSPOSE_H_
