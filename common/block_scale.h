// From the amax of a block to its scale: ops.quantize_blocks, shared by host and device, to the bit.
//
//   f32:   factor = FP8_MAX / amax, at most 2^126; 1 where amax is 0 or not finite; optionally its power of two below
//   E8M0:  factor = 2^-e, with e = ceil(log2(amax / FP8_MAX)), or floor(log2(amax)) - floor(log2(FP8_MAX)); at least
//          -127; NaN where amax is not finite
#ifndef JAXFP8_COMMON_BLOCK_SCALE_H_
#define JAXFP8_COMMON_BLOCK_SCALE_H_

#include <cstdint>

#include "common/fp8.h"
#include "common/scale.h"

namespace jaxfp8 {

enum class BlockScaling { kF32, kF32PowerOf2, kE8M0Ceil, kE8M0Floor };

JAXFP8_HD constexpr bool IsE8M0(BlockScaling scaling) {
  return scaling == BlockScaling::kE8M0Ceil || scaling == BlockScaling::kE8M0Floor;
}

struct BlockScale {
  float factor;        // multiplies
  uint32_t scale_inv;  // the bits of an f32, or the code of an E8M0
};

// `amax_bits` as AmaxBits gives them; NaN may be above infinity.
template <class Format>
JAXFP8_HD BlockScale AmaxToF32Scale(uint32_t amax_bits, bool power_of_2) {
  const ScalePair pair = AmaxToScale(BitsToFloat(amax_bits), 1.0f, BitsToFloat(Format::kMaxBits));
  if (!power_of_2) return {pair.scale, FloatToBits(pair.scale_inv)};
  const uint32_t power = FloatToBits(pair.scale) & kInfBits;
  return {BitsToFloat(power), (254u << 23) - power};  // exponents of x and 1 / x add up to twice the bias
}

// FP8_MAX is 1.75 times a power of two. The exponent of a subnormal amax is read as -127, and e is -127 whatever it is.
template <class Format>
JAXFP8_HD BlockScale AmaxToE8M0Scale(uint32_t amax_bits, bool ceil) {
  constexpr uint32_t kMantissaMask = (1u << 23) - 1;
  if (amax_bits >= kInfBits) return {BitsToFloat(0x7fc00000u), 255};
  int exponent = static_cast<int>(amax_bits >> 23) - static_cast<int>(Format::kMaxBits >> 23);
  exponent += ceil && (amax_bits & kMantissaMask) > (Format::kMaxBits & kMantissaMask) ? 1 : 0;
  if (exponent < -127) exponent = -127;
  return {BitsToFloat(static_cast<uint32_t>(127 - exponent) << 23), static_cast<uint32_t>(exponent + 127)};
}

template <class Format>
JAXFP8_HD BlockScale AmaxToBlockScale(uint32_t amax_bits, BlockScaling scaling) {
  switch (scaling) {
    case BlockScaling::kF32: return AmaxToF32Scale<Format>(amax_bits, false);
    case BlockScaling::kF32PowerOf2: return AmaxToF32Scale<Format>(amax_bits, true);
    case BlockScaling::kE8M0Ceil: return AmaxToE8M0Scale<Format>(amax_bits, true);
    default: return AmaxToE8M0Scale<Format>(amax_bits, false);
  }
}

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_BLOCK_SCALE_H_
