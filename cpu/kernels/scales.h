// The scale operand: one for all groups, or one for each.
#ifndef JAXFP8_CPU_KERNELS_SCALES_H_
#define JAXFP8_CPU_KERNELS_SCALES_H_

#include <cstdint>

namespace jaxfp8::cpu {

struct Scales {
  const float* values;
  int64_t count;

  float operator[](int64_t group) const { return values[count == 1 ? 0 : group]; }
};

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_SCALES_H_
