// data = quantize(x, scale) and amax = max |x|, in one pass over x.
#ifndef JAXFP8_CPU_KERNELS_QUANTIZE_H_
#define JAXFP8_CPU_KERNELS_QUANTIZE_H_

#include <cstdint>

#include "common/dispatch.h"
#include "cpu/kernels/scales.h"
#include "cpu/kernels/task_pool.h"

namespace jaxfp8::cpu {

// x: [groups, size] of `in`; data: the same shape of `format`; amax: [groups].
void Quantize(TaskPool& pool, Dtype in, Dtype format, const void* x, Scales scales, int64_t groups, int64_t size,
              uint8_t* data, float* amax);

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_QUANTIZE_H_
