// quantize_blocks_transpose: FP8 with a scale for each block, found from the block itself, in one layout or in both.
#ifndef JAXFP8_CPU_KERNELS_QUANTIZE_BLOCKS_TRANSPOSE_H_
#define JAXFP8_CPU_KERNELS_QUANTIZE_BLOCKS_TRANSPOSE_H_

#include <cstdint>

#include "common/block_scale.h"
#include "common/dispatch.h"
#include "cpu/kernels/task_pool.h"

namespace jaxfp8::cpu {

struct QuantizeBlocksTransposeParams {
  Dtype dtype;   // of x: bf16, f16 or f32
  Dtype format;  // of data and data_t: e4m3 or e5m2
  BlockScaling scaling;
  int64_t block_rows, block_columns;  // r and c of a block of data and of data_t; 0: as many as there are
  const void* x;                      // [groups, m, n]
  void* data;                         // [groups, m, n]
  void* scale_inv;                    // f32, or the codes of E8M0: [groups, ceil(m / r), ceil(n / c)]
  void* data_t;                       // [groups, n, m], or null
  void* scale_inv_t;                  // [groups, ceil(n / r), ceil(m / c)], or null
  int64_t groups;
  int64_t m;
  int64_t n;
};

void QuantizeBlocksTranspose(TaskPool& pool, const QuantizeBlocksTransposeParams& params);

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_QUANTIZE_BLOCKS_TRANSPOSE_H_
