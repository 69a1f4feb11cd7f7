// The two inverse scales of a product as factors of its f32 sums, which multiply one after the other.
#ifndef JAXFP8_COMMON_SCALE_PRODUCT_H_
#define JAXFP8_COMMON_SCALE_PRODUCT_H_

#include "common/fp8.h"

namespace jaxfp8 {

struct ScaleFactors {
  float first;
  float second;

  JAXFP8_HD float Scale(float sum) const { return sum * first * second; }
};

// Their product and 1, where the product is a normal number. Where it flushes or overflows, a result need not.
JAXFP8_HD ScaleFactors MultiplyScales(float a_scale_inv, float b_scale_inv) {
  constexpr uint32_t kSmallestNormalBits = 1u << 23;
  const float product = a_scale_inv * b_scale_inv;
  const uint32_t size = FloatToBits(product) & 0x7fffffffu;
  const bool is_normal = kSmallestNormalBits <= size && size < kInfBits;
  return is_normal ? ScaleFactors{product, 1.0f} : ScaleFactors{a_scale_inv, b_scale_inv};
}

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_SCALE_PRODUCT_H_
