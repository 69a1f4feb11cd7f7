// Stands in for cuda/common/packed.h: the same functions, computed as the PTX ISA manual defines the instructions.
#ifndef JAXFP8_TESTS_CUDA_EMULATOR_PACKED_H_
#define JAXFP8_TESTS_CUDA_EMULATOR_PACKED_H_

#include <cstdint>

#include "common/dispatch.h"
#include "cuda/common/ptx.h"

namespace jaxfp8::cuda {

// A NaN is the canonical one, and the sign of a number is the exclusive or of both.
template <class T>
uint32_t LargerMagnitudes(uint32_t a, uint32_t b) {
  constexpr bool kIsF32 = sizeof(T) == 4;
  const uint32_t magnitude = kIsF32 ? kAbsMask : 0x7fffu;
  const uint32_t infinity = kIsF32 ? kInfBits : std::is_same_v<T, BF16> ? 0x7f80u : 0x7c00u;
  uint32_t result = 0;
  for (int shift = 0; shift < 32; shift += 8 * sizeof(T)) {
    const uint32_t x = a >> shift & (2 * magnitude + 1), y = b >> shift & (2 * magnitude + 1);
    const uint32_t larger = max(x & magnitude, y & magnitude);
    result |= (larger > infinity ? magnitude : larger | ((x ^ y) & ~magnitude)) << shift;
  }
  return result;
}

template <class T>
uint32_t InfinitiesToNan(uint32_t x) {
  constexpr bool kIsF32 = sizeof(T) == 4;
  const uint32_t magnitude = kIsF32 ? kAbsMask : 0x7fffu;
  const uint32_t infinity = kIsF32 ? kInfBits : std::is_same_v<T, BF16> ? 0x7f80u : 0x7c00u;
  uint32_t result = 0;
  for (int shift = 0; shift < 32; shift += 8 * sizeof(T)) {
    const uint32_t element = x >> shift & (2 * magnitude + 1);
    result |= ((element & magnitude) >= infinity ? magnitude : element) << shift;
  }
  return result;
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_TESTS_CUDA_EMULATOR_PACKED_H_
