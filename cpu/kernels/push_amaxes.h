// Slot 0 of the amax histories of several quantizers set, in place where XLA lets it.
#ifndef JAXFP8_CPU_KERNELS_PUSH_AMAXES_H_
#define JAXFP8_CPU_KERNELS_PUSH_AMAXES_H_

#include "common/histories.h"

namespace jaxfp8::cpu {

void PushAmaxes(const PushAmaxesParams& params);

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_PUSH_AMAXES_H_
