// out = round(data * scale_inv): one multiplication in f32, one rounding to the output's dtype.
#ifndef JAXFP8_CPU_KERNELS_DEQUANTIZE_H_
#define JAXFP8_CPU_KERNELS_DEQUANTIZE_H_

#include <cstdint>

#include "common/dispatch.h"
#include "cpu/kernels/scales.h"
#include "cpu/kernels/task_pool.h"

namespace jaxfp8::cpu {

// data: [groups, size] of `format`; out: the same shape of `out_dtype`.
void Dequantize(TaskPool& pool, Dtype format, Dtype out_dtype, const uint8_t* data, Scales scale_invs, int64_t groups,
                int64_t size, void* out);

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_DEQUANTIZE_H_
