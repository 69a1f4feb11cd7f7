// data = quantize(x, scale) and amax = max(amax_so_far, max |x|), in one pass over x.
#ifndef JAXFP8_CPU_KERNELS_QUANTIZE_H_
#define JAXFP8_CPU_KERNELS_QUANTIZE_H_

#include <cstdint>

#include "common/dispatch.h"
#include "cpu/kernels/scales.h"
#include "cpu/kernels/task_pool.h"

namespace jaxfp8::cpu {

// x: [groups, size] of `in`; data: the same shape of `format`; amax_so_far and amax: each null, or [groups] and not
// negative; perhaps one buffer.
void Quantize(TaskPool& pool, Dtype in, Dtype format, const void* x, Scales scales, int64_t groups, int64_t size,
              uint8_t* data, const float* amax_so_far, float* amax);

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_QUANTIZE_H_
