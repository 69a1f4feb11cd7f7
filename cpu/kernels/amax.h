// amax[g] = max |x[g, :]|, NaN counted as infinity; 0 where there are no elements.
#ifndef JAXFP8_CPU_KERNELS_AMAX_H_
#define JAXFP8_CPU_KERNELS_AMAX_H_

#include <cstdint>

#include "common/dispatch.h"
#include "cpu/kernels/task_pool.h"

namespace jaxfp8::cpu {

// x: [groups, size] of `dtype`; amax: [groups].
void Amax(TaskPool& pool, Dtype dtype, const void* x, int64_t groups, int64_t size, float* amax);

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_AMAX_H_
