// The read_histories launcher: a loop on the calling thread, there are only a few histories.
#include "cpu/kernels/read_histories.h"

#include <algorithm>

namespace jaxfp8::cpu {

void ReadHistories(const ReadHistoriesParams& params) {
  for (int64_t i = 0; i < params.count; ++i) {
    const ReadHistoriesQuantizer& quantizer = params.quantizers[i];
    for (int64_t group = 0; group < params.groups; ++group) {
      const float* history = quantizer.history + group * quantizer.length;
      uint32_t largest = 0;
      for (int64_t slot = 0; slot < quantizer.length; ++slot) largest = std::max(largest, EntryBits(history[slot]));
      WriteReading(largest, history[0], quantizer.stored[group], quantizer.numerator,
                   quantizer.reading + group * quantizer.stride);
    }
  }
}

}  // namespace jaxfp8::cpu
