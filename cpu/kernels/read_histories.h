// What a step needs of the amax histories and scales of many quantizers.
#ifndef JAXFP8_CPU_KERNELS_READ_HISTORIES_H_
#define JAXFP8_CPU_KERNELS_READ_HISTORIES_H_

#include "common/histories.h"

namespace jaxfp8::cpu {

// No result may overlap an operand.
void ReadHistories(const ReadHistoriesParams& params);

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_READ_HISTORIES_H_
