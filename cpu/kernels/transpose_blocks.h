// Blocks along the rows of FP8 codes become blocks along their columns: exponents are shifted, nothing is decoded.
#ifndef JAXFP8_CPU_KERNELS_TRANSPOSE_BLOCKS_H_
#define JAXFP8_CPU_KERNELS_TRANSPOSE_BLOCKS_H_

#include "common/params.h"
#include "cpu/kernels/task_pool.h"

namespace jaxfp8::cpu {

void TransposeBlocks(TaskPool& pool, const TransposeBlocksParams& params);

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_TRANSPOSE_BLOCKS_H_
