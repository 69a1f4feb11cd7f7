// From an amax to a scale: the arithmetic shared by the CPU and CUDA kernels, to the bit.
//
//   has_amax  = 0 < amax < inf
//   scale     = amax < 0 || stored < 0 ? NaN          no step makes either: an optimizer has stepped on the state
//             : has_amax ? numerator / clamp(amax)    clamped so that the scale lies in [2^-126, 2^126]
//             : 0 < stored < inf ? 1 / clamp(stored) : 1
//   scale_inv = 1 / scale                             of the rounded scale
//
// Comparisons are of bits: subnormals count, also on threads that flush them. No operand of a division is subnormal and
// no quotient is, so that flushing changes no division either.
#ifndef JAXFP8_COMMON_SCALE_H_
#define JAXFP8_COMMON_SCALE_H_

#include <cstdint>

#include "common/fp8.h"

namespace jaxfp8 {

struct ScalePair {
  float scale;
  float scale_inv;
};

constexpr uint32_t kOneBits = 127u << 23;
constexpr uint32_t kMinScaleBits = 1u << 23;           // 2^-126, also the smallest normal float
constexpr uint32_t kMaxScaleBits = (127u + 126) << 23;  // 2^126

// Positive, finite and not subnormal.
JAXFP8_HD bool IsPositiveNormal(float x) {
  const uint32_t bits = FloatToBits(x);
  return kMinScaleBits <= bits && bits < kInfBits;
}

// Of positive normal floats with a normal quotient: rounded correctly, whatever the compiler's options for `/`.
JAXFP8_HD float Divide(float x, float y) {
#if defined(__CUDA_ARCH__)
  return __fdiv_rn(x, y);
#else
  return x / y;
#endif
}

// 0 < x < inf, of bits: 0 wraps around, NaN and negative numbers are above.
JAXFP8_HD bool IsPositiveFinite(uint32_t bits) { return bits - 1 < kInfBits - 1; }

// -inf <= x < 0, of bits: -0 and NaN of either sign are not.
JAXFP8_HD bool IsBelowZero(uint32_t bits) { return bits - 0x80000001u < kInfBits; }

JAXFP8_HD uint32_t ClampBits(uint32_t bits, uint32_t low, uint32_t high) {
  return bits < low ? low : bits > high ? high : bits;
}

// `numerator` is positive and normal: FP8_MAX / 2^margin.
JAXFP8_HD ScalePair AmaxToScale(float amax, float stored, float numerator) {
  constexpr uint32_t kPower = 126u << 23;        // added to the bits of a float: times 2^126
  constexpr uint32_t kBelowFour = 0x407fffffu;  // times 2^126 the largest float
  const uint32_t numerator_bits = FloatToBits(numerator);
  // max(numerator / 2^126, 2^-126) and min(numerator / 2^-126, the largest float), both exact.
  const uint32_t smallest = ClampBits(numerator_bits, kOneBits, kInfBits) - kPower;
  const uint32_t largest = ClampBits(numerator_bits, 0, kBelowFour) + kPower;

  const uint32_t amax_bits = FloatToBits(amax);
  const uint32_t stored_bits = FloatToBits(stored);
  if (IsBelowZero(amax_bits) || IsBelowZero(stored_bits)) {
    const float nan = BitsToFloat(0x7fc00000u);
    return {nan, nan};
  }
  const bool has_amax = IsPositiveFinite(amax_bits);
  const uint32_t stored_in_range =
      IsPositiveFinite(stored_bits) ? ClampBits(stored_bits, kMinScaleBits, kMaxScaleBits) : kOneBits;
  const float scale = Divide(has_amax ? numerator : 1.0f,
                             BitsToFloat(has_amax ? ClampBits(amax_bits, smallest, largest) : stored_in_range));
  return {scale, Divide(1.0f, scale)};
}

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_SCALE_H_
