// The scales of several quantizers from their amax histories, and the histories moved one step.
#ifndef JAXFP8_CPU_KERNELS_DELAYED_SCALES_H_
#define JAXFP8_CPU_KERNELS_DELAYED_SCALES_H_

#include "common/histories.h"

namespace jaxfp8::cpu {

// No result may overlap an operand.
void DelayedScales(const DelayedScalesParams& params);

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_DELAYED_SCALES_H_
