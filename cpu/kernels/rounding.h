// Rounding to FP8 without a branch: the constants of one floating-point addition, for the vector blocks.
//
// For 0 <= y <= kMax let e be the exponent field of y, but at least that of the smallest normal FP8 number, and M the
// float whose exponent field is e + 23 - kMantissaBits: one unit in M's last place is the FP8 spacing around y. So
// M + y rounds y to that spacing, to nearest even, subnormals included, and leaves k = y / spacing in its low bits. The
// code is k plus kMantissaBits places of exponent:
//
//   code = low byte of ( bits(M + y) + (e >> kShift) ),   M = bits(e) + kMagic
//
// kMagic also brings along the exponent's bias, as a small even number of last places that changes no rounding.
#ifndef JAXFP8_CPU_KERNELS_ROUNDING_H_
#define JAXFP8_CPU_KERNELS_ROUNDING_H_

#include <cstdint>

namespace jaxfp8::cpu {

template <class Format>
struct Rounding {
  static constexpr uint32_t kShift = 23 - Format::kMantissaBits;
  static constexpr uint32_t kMinExponent = 128 - Format::kExponentBias;
  static constexpr uint32_t kMinNormalBits = kMinExponent << 23;
  static constexpr uint32_t kBias = (0u - (kMinExponent << Format::kMantissaBits)) & 0xffu;
  static constexpr uint32_t kMagic = (kShift << 23) + kBias;
  static constexpr uint32_t kMaxBits = Format::kMaxBits;
  static_assert(kBias % 2 == 0, "an odd number of last places would turn ties to even into ties to odd");
};

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_ROUNDING_H_
