// The write_histories launcher: a loop on the calling thread, there are only a few histories.
#include "cpu/kernels/write_histories.h"

#include <algorithm>

namespace jaxfp8::cpu {

void WriteHistories(const WriteHistoriesParams& params) {
  for (int64_t i = 0; i < params.count; ++i) {
    const WriteHistoriesQuantizer& quantizer = params.quantizers[i];
    const int64_t length = quantizer.length;
    for (int64_t group = 0; group < params.groups; ++group) {
      const float* history = quantizer.history + group * length;
      const float* amax = quantizer.amax + group * quantizer.stride;
      const float scale_inv = quantizer.scale_inv[group * quantizer.stride];
      float* next_history = quantizer.next_history + group * length;
      quantizer.next_scale[group] = scale_inv;
      if (!IsUsed(scale_inv)) {
        std::fill(next_history, next_history + length, 0.0f);
        continue;
      }
      if (Stays(amax, quantizer.stride)) {
        for (int64_t slot = 1; slot < length; ++slot) next_history[slot] = BitsToFloat(StayingBits(history[slot]));
        next_history[0] = BitsToFloat(StayingBits(*amax));
        continue;
      }
      // Upwards, because the two histories may be one; slot 0 goes to the end, and its new amax takes its place.
      const float newest = BitsToFloat(CleanBits(history[0]));
      for (int64_t slot = 2; slot < length; ++slot) next_history[slot - 1] = BitsToFloat(CleanBits(history[slot]));
      next_history[length - 1] = newest;
      next_history[0] = BitsToFloat(CleanBits(*amax));
    }
  }
}

}  // namespace jaxfp8::cpu
