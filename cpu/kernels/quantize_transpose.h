// data = quantize(x, scale), data_t = its transpose, and amax = max(amax_so_far, max |x|), in one pass over x.
#ifndef JAXFP8_CPU_KERNELS_QUANTIZE_TRANSPOSE_H_
#define JAXFP8_CPU_KERNELS_QUANTIZE_TRANSPOSE_H_

#include "common/params.h"
#include "cpu/kernels/task_pool.h"

namespace jaxfp8::cpu {

void QuantizeTranspose(TaskPool& pool, const QuantizeTransposeParams& params);

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_QUANTIZE_TRANSPOSE_H_
