// The amax_to_scale launcher: a loop on the calling thread, there are only a few scales.
#include "cpu/kernels/amax_to_scale.h"

#include "common/scale.h"

namespace jaxfp8::cpu {

// Without ScopedIeee: nothing subnormal meets a division (common/scale.h).
void AmaxToScale(const float* amax, const float* stored, float numerator, int64_t count, float* scale,
                 float* scale_inv) {
  for (int64_t i = 0; i < count; ++i) {
    const ScalePair pair = jaxfp8::AmaxToScale(amax[i], stored[i], numerator);
    scale[i] = pair.scale;
    scale_inv[i] = pair.scale_inv;
  }
}

}  // namespace jaxfp8::cpu
