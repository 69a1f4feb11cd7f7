// data = quantize(x, scale), data_t = its transpose, and amax = max(amax_so_far, max |x|), in one pass over x.
#ifndef JAXFP8_CPU_KERNELS_QUANTIZE_TRANSPOSE_H_
#define JAXFP8_CPU_KERNELS_QUANTIZE_TRANSPOSE_H_

#include <cstdint>

#include "common/dispatch.h"
#include "cpu/kernels/scales.h"
#include "cpu/kernels/task_pool.h"

namespace jaxfp8::cpu {

// x: [groups, m, n] of `in`; data: [groups, m, n] and data_t: [groups, n, m] of `format`; amax_so_far and amax: each
// null, or [groups] and not negative; perhaps one buffer. column_sums: null, or [groups, ColumnSumParts(m), n]: the sums
// of x over 128 rows each.
void QuantizeTranspose(TaskPool& pool, Dtype in, Dtype format, const void* x, Scales scales, int64_t groups, int64_t m,
                       int64_t n, uint8_t* data, uint8_t* data_t, const float* amax_so_far, float* amax,
                       float* column_sums);

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_QUANTIZE_TRANSPOSE_H_
