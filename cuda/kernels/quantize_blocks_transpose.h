// quantize_blocks_transpose: FP8 with a scale for each block, found from the block itself, in both layouts.
#ifndef JAXFP8_CUDA_KERNELS_QUANTIZE_BLOCKS_TRANSPOSE_H_
#define JAXFP8_CUDA_KERNELS_QUANTIZE_BLOCKS_TRANSPOSE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/block_scale.h"
#include "common/dispatch.h"

namespace jaxfp8::cuda {

// What of a row-major [rows, k] shares a scale.
enum class BlockShape { kRow, k1x32, k1x128, k128x128 };

struct QuantizeBlocksTransposeParams {
  Dtype dtype;   // of x: bf16, f16 or f32
  Dtype format;  // of data and data_t: e4m3 or e5m2
  BlockShape block;
  BlockScaling scaling;
  const void* x;      // [groups, m, n]
  void* data;         // [groups, m, n]
  void* scale_inv;    // f32 or E8M0, for each block of data, where a product reads it (scale_mode.h)
  void* data_t;       // [groups, n, m], or null
  void* scale_inv_t;  // for each block of data_t, or null
  float* amaxes;      // with kRow: scratch, [groups * m] and, with data_t, then [groups * n]
  int64_t groups;
  int64_t m;
  int64_t n;
};

cudaError_t LaunchQuantizeBlocksTranspose(const QuantizeBlocksTransposeParams& params, cudaStream_t stream);

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_QUANTIZE_BLOCKS_TRANSPOSE_H_
