// The delayed_scales launcher: a loop on the calling thread, there are only a few histories.
#include "cpu/kernels/delayed_scales.h"

#include <algorithm>

namespace jaxfp8::cpu {

// Without ScopedIeee: bits, and nothing subnormal meets a division (common/scale.h).
void DelayedScales(const DelayedScalesParams& params) {
  for (int64_t i = 0; i < params.count; ++i) {
    const DelayedScalesQuantizer& quantizer = params.quantizers[i];
    const int64_t length = quantizer.length;
    for (int64_t group = 0; group < params.groups; ++group) {
      const float* history = quantizer.history + group * length;
      uint32_t largest = 0;
      for (int64_t slot = 0; slot < length; ++slot) {
        const uint32_t bits = EntryBits(history[slot]);
        if (slot == 0 || !params.most_recent || bits == kInfBits) largest = std::max(largest, bits);
      }
      const ScalePair pair = DelayedScale(largest, quantizer.stored[group], quantizer.numerator);
      quantizer.scale[group] = pair.scale;
      quantizer.scale_inv[group] = pair.scale_inv;
      quantizer.amax[group] = 0.0f;
    }
  }
}

}  // namespace jaxfp8::cpu
