// The push_amaxes launcher: a loop on the calling thread, there are only a few numbers.
#include "cpu/kernels/push_amaxes.h"

#include <cstring>

namespace jaxfp8::cpu {

void PushAmaxes(const PushAmaxesParams& params) {
  for (int64_t i = 0; i < params.count; ++i) {
    const PushAmaxesQuantizer& quantizer = params.quantizers[i];
    if (quantizer.next_history != quantizer.history) {
      memcpy(quantizer.next_history, quantizer.history, params.groups * quantizer.length * sizeof(float));
    }
    for (int64_t group = 0; group < params.groups; ++group) {
      quantizer.next_history[group * quantizer.length] = BitsToFloat(CleanBits(quantizer.amax[group]));
    }
  }
}

}  // namespace jaxfp8::cpu
