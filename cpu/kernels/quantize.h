// data = quantize(x, scale) and amax = max(amax_so_far, max |x|), in one pass over x.
#ifndef JAXFP8_CPU_KERNELS_QUANTIZE_H_
#define JAXFP8_CPU_KERNELS_QUANTIZE_H_

#include "common/params.h"
#include "cpu/kernels/task_pool.h"

namespace jaxfp8::cpu {

void Quantize(TaskPool& pool, const QuantizeParams& params);

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_QUANTIZE_H_
