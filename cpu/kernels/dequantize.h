// out = round(data * scale_inv): one multiplication in f32, one rounding to the output's dtype.
#ifndef JAXFP8_CPU_KERNELS_DEQUANTIZE_H_
#define JAXFP8_CPU_KERNELS_DEQUANTIZE_H_

#include "common/params.h"
#include "cpu/kernels/task_pool.h"

namespace jaxfp8::cpu {

void Dequantize(TaskPool& pool, const DequantizeParams& params);

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_DEQUANTIZE_H_
