// The next amax histories and scales of many quantizers, from what a step recorded.
#ifndef JAXFP8_CPU_KERNELS_WRITE_HISTORIES_H_
#define JAXFP8_CPU_KERNELS_WRITE_HISTORIES_H_

#include "common/histories.h"

namespace jaxfp8::cpu {

// A next history may be the history; no other result may overlap an operand.
void WriteHistories(const WriteHistoriesParams& params);

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_WRITE_HISTORIES_H_
