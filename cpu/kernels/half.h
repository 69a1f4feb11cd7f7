// bfloat16 and float16 to float and back: exact, and round to nearest even with one quiet NaN.
//
// Integer arithmetic, for processors (and compilers) without instructions for these types.
#ifndef JAXFP8_CPU_KERNELS_HALF_H_
#define JAXFP8_CPU_KERNELS_HALF_H_

#include <cstdint>

#include "common/dispatch.h"

namespace jaxfp8::cpu {

JAXFP8_HD float Widen(float x) { return x; }
JAXFP8_HD float Widen(BF16 x) { return BitsToFloat(static_cast<uint32_t>(x.bits) << 16); }
JAXFP8_HD float Widen(F16 x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000u) << 16;
  const uint32_t magnitude = x.bits & 0x7fffu;
  // Above 2^-14: the same bits, 13 places up, with the exponent's bias changed from 15 to 127, or to all ones.
  const uint32_t bias = magnitude < 0x7c00u ? 112u << 23 : 224u << 23;
  const uint32_t normal = (magnitude << 13) + bias;
  const uint32_t subnormal = FloatToBits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
  return BitsToFloat(sign | (magnitude < 0x0400u ? subnormal : normal));
}

template <class Out>
Out Narrow(float y);

template <>
JAXFP8_HD float Narrow<float>(float y) {
  return y == y ? y : BitsToFloat(0x7fc00000u);
}

template <>
JAXFP8_HD BF16 Narrow<BF16>(float y) {
  const uint32_t bits = FloatToBits(y);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return {static_cast<uint16_t>(y == y ? rounded : 0x7fc0u)};
}

template <>
JAXFP8_HD F16 Narrow<F16>(float y) {
  const uint32_t sign = (FloatToBits(y) >> 16) & 0x8000u;
  const uint32_t magnitude = FloatToBits(y) & kAbsMask;
  if (magnitude > kInfBits) return {0x7e00u};
  uint32_t code;
  if (magnitude >= 0x47800000u) {  // 65536: rounding takes [65520, 65536) to infinity by itself
    code = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // 2^-14: a subnormal is a multiple of 2^-24, the last place of 0.5
    code = FloatToBits(BitsToFloat(magnitude) + 0.5f) - 0x3f000000u;
  } else {
    code = ((magnitude + 0xfffu + ((magnitude >> 13) & 1u)) >> 13) - (112u << 10);
  }
  return {static_cast<uint16_t>(sign | code)};
}

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_HALF_H_
