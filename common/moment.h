// The arithmetic of moments in FP8, shared by the CPU and CUDA kernels, to the bit: the fraction of an amax that a code
// stands for, and the code of a fraction (jaxfp8/ops/_encode_moment.py has the definition).
//
// Subnormal numbers count as zero. No result here is subnormal where no operand is, so threads that flush them and
// others agree; products that can be are the kernels' own.
#ifndef JAXFP8_COMMON_MOMENT_H_
#define JAXFP8_COMMON_MOMENT_H_

#include <cstdint>

#include "common/fp8.h"

namespace jaxfp8 {

constexpr int64_t kMomentBlock = 128;  // elements; the last block of a row may have fewer
constexpr uint32_t kSmallestNormalBits = 0x00800000u;
constexpr float kMomentMax = 448.0f;
constexpr int32_t kDropped = 20;  // bits of the significand of an f32, in e4m3

// Rounded once: no compiler may make one operation of it and a sum.
JAXFP8_HD float Product(float x, float y) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(x, y);
#else
  return x * y;
#endif
}

JAXFP8_HD float Root(float x) {
#if defined(__CUDA_ARCH__)
  return __fsqrt_rn(x);
#else
  return __builtin_sqrtf(x);
#endif
}

JAXFP8_HD float Power(float u, int exponent) {
  return exponent > 0 ? Product(u, u) : exponent < 0 ? Root(u) : u;
}

// The fraction of the amax that a code in [0, 0x7f) stands for. 0x7f gives a number too.
JAXFP8_HD float DecodeFraction(uint32_t code, int exponent) {
#if defined(__CUDA_ARCH__)
  // Times 2^-120 a code is a float of the same bits, also a subnormal one: GPUs do not flush it.
  return Power(__fmul_rn(BitsToFloat(code << kDropped), 0x1p120f / kMomentMax), -exponent);
#else
  // In 32 bits throughout, which compilers vectorise. With an exponent one higher a subnormal code is off by 2^-6.
  const bool is_subnormal = code < 8;
  const float value = BitsToFloat((code << kDropped) + (is_subnormal ? 121u << 23 : 120u << 23));
  return Power((value - (is_subnormal ? 0x1p-6f : 0.0f)) * (1 / kMomentMax), -exponent);
#endif
}

// The exponent that the span of a block allows: 2^-7.4 and 2^-14.8 of squares, 2^-9.4 and 2^-18.8 else, as jnp rounds
// them. `bottom` is the smallest magnitude, infinity in a block of zeros.
template <bool kSquared>
JAXFP8_HD int ExponentOfSpan(float top, float bottom) {
  constexpr float of_2 = kSquared ? 0x1.8406p-8f : 0x1.8406p-10f, of_1 = kSquared ? 0x1.261118p-15f : 0x1.261118p-19f;
  return bottom >= Product(top, of_2) ? 1 : bottom >= Product(top, of_1) ? 0 : -1;
}

// Bits that count: a bijection of u32 in which each bit changes half of the bits of the result.
JAXFP8_HD uint32_t Mix(uint32_t x) {
  x += 0x9e3779b9u;
  x = (x ^ x >> 16) * 0x85ebca6bu;
  x = (x ^ x >> 13) * 0xc2b2ae35u;
  return x ^ x >> 16;
}

// The random bits of the elements i of a block, in their high bits: key + i mix(key) + i^2 mix(mix(key)).
struct RandomBits {
  uint32_t start, linear, square;

  JAXFP8_HD explicit RandomBits(uint32_t key) : start(key), linear(Mix(key)), square(Mix(linear)) {}
  JAXFP8_HD uint32_t operator[](uint32_t i) const { return start + i * (linear + i * square); }
  // Counts elements from element i on.
  JAXFP8_HD void Skip(uint32_t i) {
    start = (*this)[i];
    linear += 2 * i * square;
  }
};

// The code of y in [0, 448] with 20 bits after the point: below the smallest normal number a multiple of 2^-29.
JAXFP8_HD int32_t FixedPoint(float y) {
#if defined(__CUDA_ARCH__)
  return static_cast<int32_t>(FloatToBits(__fmul_rz(y, 0x1p-120f)));  // subnormal there
#else
  constexpr float kMinNormal = 0x1p-6f;
  const int32_t multiple = static_cast<int32_t>((y < kMinNormal ? y : kMinNormal) * 0x1p29f);
  return y < kMinNormal ? multiple : static_cast<int32_t>(FloatToBits(y)) - (120 << 23);
#endif
}

// A neighbour of y in [0, 448] in e4m3: the one above with a probability that keeps the mean of x^(1/4), as
// _round_square of jaxfp8/numerics/_moment_codec.py derives it.
JAXFP8_HD int32_t RoundSquare(float y, int exponent, uint32_t random) {
  constexpr int32_t kFraction = (1 << kDropped) - 1;
  const int32_t factor = exponent > 0 ? 119 : exponent < 0 ? 68 : 102;
  const int32_t fixed_point = FixedPoint(y);
  const int32_t code = fixed_point >> kDropped, fraction = fixed_point & kFraction;
  const int32_t product = (fraction * ((kFraction + 1 - fraction) >> 9)) >> 11;
  const int32_t probability = fraction + ((product * (15 - (code & 7)) * factor) >> 15);
  return code + ((probability + static_cast<int32_t>(random >> (32 - kDropped))) >> kDropped);
}

// The fraction that a code stands for, and 2^-24 of the way to the next. Above the largest code is none: no fraction is
// above that.
struct CodeStep {
  float below, part;
};
JAXFP8_HD CodeStep DecodeStep(uint32_t code, int exponent) {
  const float below = DecodeFraction(code, exponent), above = DecodeFraction(code + 1, exponent);
  return {code < E4M3::kMaxCode ? below : 2.0f, Product(above - below, 0x1p-24f)};
}

// A neighbour of y = 448 u^k: the one above, if there is one, with a probability that keeps the mean of u. `step(code)`
// is a DecodeStep.
template <class Step>
JAXFP8_HD int32_t RoundSigned(float u, float y, uint32_t random, const Step& step) {
  const int32_t code = FixedPoint(y) >> kDropped;
  const CodeStep of_code = step(code);
  const float draw = Product(static_cast<float>(static_cast<int32_t>(random >> 8)), of_code.part);
  // Below 0, by its sign, where the draw is less than the place between the codes.
  return code + static_cast<int32_t>(FloatToBits(draw - (u - of_code.below)) >> 31);
}

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_MOMENT_H_
