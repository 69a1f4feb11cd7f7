// Codes of numbers that are divided by a power of two: ops.transpose_blocks, shared by host and device, to the bit.
#ifndef JAXFP8_COMMON_FP8_SHIFT_H_
#define JAXFP8_COMMON_FP8_SHIFT_H_

#include <cstdint>

#include "common/fp8.h"

namespace jaxfp8 {

constexpr uint32_t kNanScaleCode = 255;  // of E8M0

// The code of decode(code) / 2^shift, rounded to nearest even; zeros keep their sign, infinities and NaN their code.
template <class Format>
JAXFP8_HD uint8_t ShiftDown(uint8_t code, uint32_t shift) {
  constexpr uint32_t kHidden = 1u << Format::kMantissaBits;
  const uint32_t magnitude = code & 0x7fu, exponent = magnitude >> Format::kMantissaBits;
  if (shift == 0 || magnitude > Format::kMaxCode) return code;
  if (exponent > shift) return static_cast<uint8_t>(code - (shift << Format::kMantissaBits));
  // A subnormal: an integer of kMantissaBits, or the smallest normal number, which follows them.
  const uint32_t significand = exponent == 0 ? magnitude : (magnitude & (kHidden - 1)) | kHidden;
  const uint32_t places = exponent == 0 ? shift : shift - exponent + 1;
  if (places > Format::kMantissaBits + 1) return code & 0x80u;
  const uint32_t half = (1u << (places - 1)) - 1 + ((significand >> places) & 1u);
  return static_cast<uint8_t>((code & 0x80u) | ((significand + half) >> places));
}

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_FP8_SHIFT_H_
