// Floating-point numbers as the instructions round, compare and approximate them.
//
// Sections are those of NVIDIA's "Parallel Thread Execution ISA", version 9.0.
#ifndef JAXFP8_TESTS_CUDA_PTX_NUMBERS_H_
#define JAXFP8_TESTS_CUDA_PTX_NUMBERS_H_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace ptx {

inline float AsFloat(uint64_t bits) { return std::bit_cast<float>(static_cast<uint32_t>(bits)); }

// The bits of an f32 result; every NaN is the canonical one (9.7.3).
inline uint64_t AsBits(float value) { return value != value ? 0x7fffffffu : std::bit_cast<uint32_t>(value); }

// A floating-point format of 8 or 16 bits (5.2.3, 5.2.4).
struct Format {
  int exponent_bits, mantissa_bits, bias;
  double max;
  uint32_t largest, infinity, nan;

  constexpr int MinExponent() const { return 1 - bias; }
  constexpr int MagnitudeBits() const { return exponent_bits + mantissa_bits; }
};
// E4M3 has no infinity: its conversions saturate always.
inline constexpr Format kE4M3 = {4, 3, 7, 448, 0x7e, 0x7e, 0x7f};
inline constexpr Format kE5M2 = {5, 2, 15, 57344, 0x7b, 0x7c, 0x7f};
inline constexpr Format kF16 = {5, 10, 15, 65504, 0x7bff, 0x7c00, 0x7fff};
inline constexpr Format kBF16 = {8, 7, 127, 3.3895313892515355e38, 0x7f7f, 0x7f80, 0x7fff};

// Rounds to the nearest number of a format, ties to even. `satfinite` gives the largest number for what is too large.
inline uint32_t Round(const Format& format, double x, bool satfinite) {
  if (x != x) return format.nan;
  const uint32_t sign = std::signbit(x) ? 1u << format.MagnitudeBits() : 0;
  const double magnitude = std::fabs(x);
  if (magnitude == 0) return sign;
  const uint32_t too_large = sign | (satfinite ? format.largest : format.infinity);
  if (std::isinf(magnitude)) return too_large;
  const int exponent = std::max(std::ilogb(magnitude), format.MinExponent());
  const double spacing = std::ldexp(1.0, exponent - format.mantissa_bits);
  const double rounded = std::nearbyint(magnitude / spacing) * spacing;
  if (rounded > format.max) return too_large;
  if (rounded == 0) return sign;
  // Codes count the numbers from 0 up. Each exponent has as many numbers as there are subnormal ones.
  const int place = std::max(std::ilogb(rounded), format.MinExponent());
  const auto significand = static_cast<uint32_t>(std::ldexp(rounded, format.mantissa_bits - place));
  return sign | ((static_cast<uint32_t>(place - format.MinExponent()) << format.mantissa_bits) + significand);
}

inline double Decode(const Format& format, uint32_t code) {
  const uint32_t magnitude = code & ((1u << format.MagnitudeBits()) - 1);
  const bool is_negative = (code >> format.MagnitudeBits() & 1) != 0;
  double value;
  if (magnitude > std::max(format.largest, format.infinity)) {
    value = std::numeric_limits<double>::quiet_NaN();
  } else if (magnitude > format.largest) {
    value = std::numeric_limits<double>::infinity();
  } else {
    const uint32_t exponent = magnitude >> format.mantissa_bits;
    const uint32_t fraction = magnitude & ((1u << format.mantissa_bits) - 1);
    const uint32_t significand = exponent == 0 ? fraction : fraction | 1u << format.mantissa_bits;
    const int place = static_cast<int>(std::max(exponent, 1u)) - format.bias - format.mantissa_bits;
    value = std::ldexp(static_cast<double>(significand), place);
  }
  return is_negative ? -value : value;
}

// 9.7.3.11, 9.7.3.12: +0 is larger than -0. With `.NaN` a NaN operand gives NaN, without it the other operand.
inline float Larger(float x, float y, bool keeps_nan) {
  const bool has_x = x == x, has_y = y == y;
  if ((keeps_nan && !(has_x && has_y)) || !(has_x || has_y)) return std::numeric_limits<float>::quiet_NaN();
  if (!has_x || !has_y) return has_x ? x : y;
  return x == y ? (std::signbit(x) ? y : x) : std::max(x, y);
}
inline float Smaller(float x, float y, bool keeps_nan) { return -Larger(-x, -y, keeps_nan); }

// 9.7.4.8, max.NaN.xorsign.abs: the larger magnitude, with the product of the signs.
inline uint32_t LargerMagnitude(const Format& format, uint32_t x, uint32_t y) {
  const uint32_t sign_bit = 1u << format.MagnitudeBits();
  const uint32_t magnitude_x = x & (sign_bit - 1), magnitude_y = y & (sign_bit - 1);
  if (std::max(magnitude_x, magnitude_y) > format.infinity) return format.nan;
  return ((x ^ y) & sign_bit) | std::max(magnitude_x, magnitude_y);
}

// 9.7.4.4, fma.rn of f16 or bf16: one rounding. The sum is rounded to odd first, so that a second rounding is harmless.
inline uint32_t MultiplyAdd(const Format& format, uint32_t x, uint32_t y, uint32_t z) {
  const double product = Decode(format, x) * Decode(format, y);  // exact
  const double addend = Decode(format, z);
  double sum = product + addend;
  if (std::isfinite(sum)) {
    const double product_part = sum - addend, addend_part = sum - product_part;
    const double lost = (product - product_part) + (addend - addend_part);
    if (lost != 0 && (std::bit_cast<uint64_t>(sum) & 1) == 0) {
      sum = std::nextafter(sum, lost > 0 ? std::numeric_limits<double>::infinity()
                                         : -std::numeric_limits<double>::infinity());
    }
  }
  return Round(format, sum, false);
}

// Which end of their documented error approximations take: 1 too large, -1 too small, 0 either, as the operand decides.
inline int approximation_error = 0;

inline float Flushed(float x) {
  return std::fabs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0f, x) : x;
}

// `exact`, off by `ulps` units in the last place.
inline float Off(double exact, float operand, int ulps, int direction) {
  const auto nearest = static_cast<float>(exact);
  if (Flushed(nearest) == 0 || std::isinf(nearest)) return Flushed(nearest);
  if (direction == 0) direction = std::bit_cast<uint32_t>(operand) & 1 ? -1 : 1;
  // Bits of one sign count magnitudes; what becomes infinite or subnormal is documented to be so only near the ends.
  const float off = std::bit_cast<float>(std::bit_cast<uint32_t>(nearest) + static_cast<uint32_t>(direction * ulps));
  return std::isfinite(off) ? Flushed(off) : nearest;
}

// 9.7.3.21, ex2.approx.ftz.f32: to 2 ulp; of zeros exactly 1.
inline float ApproximateExp2(float x) {
  if (x != x || Flushed(x) == 0) return x != x ? x : 1.0f;
  return Off(std::exp2(static_cast<double>(x)), x, 2, approximation_error);
}

// 9.7.3.13, rcp.approx.ftz.f32: to 1 ulp. Its error is the other way than that of ex2: 1 / (1 + 2^x) is at its ends.
inline float ApproximateReciprocal(float x) {
  if (x != x) return x;
  if (Flushed(x) == 0) return std::copysign(std::numeric_limits<float>::infinity(), x);
  return Off(1.0 / static_cast<double>(x), x, 1, -approximation_error);
}

// 9.7.3.17, rsqrt.approx.ftz.f32: to 2^-22.9 of the result, which is 2 ulp and a seventh.
inline float ApproximateReciprocalRoot(float x) {
  if (x != x || x <= -std::numeric_limits<float>::min()) return std::numeric_limits<float>::quiet_NaN();
  if (Flushed(x) == 0) return std::copysign(std::numeric_limits<float>::infinity(), x);
  return Off(1.0 / std::sqrt(static_cast<double>(x)), x, 2, approximation_error);
}

}  // namespace ptx

#endif  // JAXFP8_TESTS_CUDA_PTX_NUMBERS_H_
