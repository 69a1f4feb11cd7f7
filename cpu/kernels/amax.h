// amax[g] = max |x[g, :]|, NaN counted as infinity; 0 where there are no elements.
#ifndef JAXFP8_CPU_KERNELS_AMAX_H_
#define JAXFP8_CPU_KERNELS_AMAX_H_

#include "common/params.h"
#include "cpu/kernels/task_pool.h"

namespace jaxfp8::cpu {

void Amax(TaskPool& pool, const AmaxParams& params);

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_AMAX_H_
