// What a step recorded of each quantizer, from its old state and the cotangent of that state, free of factors:
// jaxfp8/ops/_undo_factors.py, whose reference is the definition.
#ifndef JAXFP8_CPU_KERNELS_UNDO_FACTORS_H_
#define JAXFP8_CPU_KERNELS_UNDO_FACTORS_H_

#include <cstdint>

namespace jaxfp8::cpu {

struct UndoFactorsParams {
  const float* history;      // [groups, length]
  const float* scale;        // [groups]
  const float* new_history;  // [groups, length]
  const float* new_scale;    // [groups]
  float* amax;               // [groups], as the others
  float* scale_inv;
  float* stays;
  float* factor;
  int64_t groups;
  int64_t length;  // at least 1
};

void UndoFactors(const UndoFactorsParams& params);

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_UNDO_FACTORS_H_
