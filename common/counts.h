// What is counted of a tensor on its way to FP8: elements that saturate, and elements that become zero.
//
// Both are comparisons of the product y = x * scale as bits, so that no mode of the processor and no order of the
// elements changes a count.
#ifndef JAXFP8_COMMON_COUNTS_H_
#define JAXFP8_COMMON_COUNTS_H_

#include <cstdint>

#include "common/fp8.h"

namespace jaxfp8 {

// As a result of a custom call: u32 [4], each count as its low and its high word.
struct Counts {
  uint64_t saturated;
  uint64_t flushed;
};
static_assert(sizeof(Counts) == 4 * sizeof(uint32_t), "counts are u32 [4]");

// |y| is above the largest number of the format. Infinity is, NaN is not.
template <class Format>
JAXFP8_HD bool Saturates(float y) {
  // One comparison: magnitudes up to the largest wrap around.
  return (FloatToBits(y) & kAbsMask) - (Format::kMaxBits + 1u) <= kInfBits - (Format::kMaxBits + 1u);
}

// x is not zero and its code is. Half of the smallest subnormal lies between zero and that, and rounds to the even one.
template <class Format>
JAXFP8_HD bool FlushesToZero(float x, float y) {
  constexpr uint32_t kHalfOfSmallestBits =
      static_cast<uint32_t>(127 - Format::kExponentBias - Format::kMantissaBits) << 23;
  return (FloatToBits(y) & kAbsMask) <= kHalfOfSmallestBits && (FloatToBits(x) & kAbsMask) != 0;
}

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_COUNTS_H_
