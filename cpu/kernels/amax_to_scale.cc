// The amax_to_scale launcher: a loop on the calling thread, there are only a few scales.
#include "cpu/kernels/amax_to_scale.h"

#include "common/scale.h"

namespace jaxfp8::cpu {

// Without ScopedIeee: nothing subnormal meets a division (common/scale.h).
void AmaxToScale(const AmaxToScaleParams& params) {
  for (int64_t i = 0; i < params.count; ++i) {
    const ScalePair pair = jaxfp8::AmaxToScale(params.amax[i], params.stored[i], params.numerator);
    params.scale[i] = pair.scale;
    params.scale_inv[i] = pair.scale_inv;
  }
}

}  // namespace jaxfp8::cpu
