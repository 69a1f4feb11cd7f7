// scale and scale_inv of each amax, or of the stored scale_inv where there is no amax.
#ifndef JAXFP8_CPU_KERNELS_AMAX_TO_SCALE_H_
#define JAXFP8_CPU_KERNELS_AMAX_TO_SCALE_H_

#include "common/params.h"

namespace jaxfp8::cpu {

void AmaxToScale(const AmaxToScaleParams& params);

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_AMAX_TO_SCALE_H_
