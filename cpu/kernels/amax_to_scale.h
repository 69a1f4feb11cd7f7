// scale and scale_inv of each amax, or of the stored scale_inv where there is no amax.
#ifndef JAXFP8_CPU_KERNELS_AMAX_TO_SCALE_H_
#define JAXFP8_CPU_KERNELS_AMAX_TO_SCALE_H_

#include <cstdint>

namespace jaxfp8::cpu {

// All of [count]; numerator: positive and normal.
void AmaxToScale(const float* amax, const float* stored, float numerator, int64_t count, float* scale,
                 float* scale_inv);

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_AMAX_TO_SCALE_H_
