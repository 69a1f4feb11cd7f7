// The FP8 codec: the rounding core shared by the CPU and CUDA kernels, to the bit.
//
//   encode(y)       float -> code: round to nearest even, saturate, NaN stays NaN
//   quantize(x, s)  encode(x * s), except that a non-finite x gives the NaN code
//   decode(code)    code -> float, exact
//
// Integer arithmetic throughout (and one addition that never sees a subnormal result), so flush-to-zero modes
// do not change a code. Every function is plain C++17 and compiles for the host and the device alike.
#ifndef JAXFP8_COMMON_FP8_H_
#define JAXFP8_COMMON_FP8_H_

#include <cstdint>
#include <cstring>

#if defined(__CUDACC__)
#define JAXFP8_HD __host__ __device__ __forceinline__
#elif defined(__GNUC__)
// Forced: files that include this are compiled for different instruction sets, and of several out-of-line copies the
// linker would keep one, perhaps one that the processor cannot run.
#define JAXFP8_HD inline __attribute__((always_inline))
#else
#define JAXFP8_HD inline
#endif

namespace jaxfp8 {

// float8_e4m3fn: 4 exponent bits, 3 mantissa bits, no infinity, one NaN per sign.
struct E4M3 {
  static constexpr int kMantissaBits = 3;
  static constexpr int kExponentBias = 7;
  static constexpr uint32_t kMaxBits = 0x43e00000u;  // 448.0f
  static constexpr uint8_t kMaxCode = 0x7e;
  static constexpr uint8_t kNanCode = 0x7f;
  JAXFP8_HD static constexpr bool IsNan(uint8_t code) { return (code & 0x7f) == 0x7f; }
  JAXFP8_HD static constexpr bool IsInf(uint8_t) { return false; }
};

// float8_e5m2: 5 exponent bits, 2 mantissa bits, IEEE infinities and NaNs. The codec never produces an infinity.
struct E5M2 {
  static constexpr int kMantissaBits = 2;
  static constexpr int kExponentBias = 15;
  static constexpr uint32_t kMaxBits = 0x47600000u;  // 57344.0f
  static constexpr uint8_t kMaxCode = 0x7b;
  static constexpr uint8_t kNanCode = 0x7e;
  JAXFP8_HD static constexpr bool IsNan(uint8_t code) { return (code & 0x7f) > 0x7c; }
  JAXFP8_HD static constexpr bool IsInf(uint8_t code) { return (code & 0x7f) == 0x7c; }
};

JAXFP8_HD uint32_t FloatToBits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof(bits));
  return bits;
}

JAXFP8_HD float BitsToFloat(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

constexpr uint32_t kAbsMask = 0x7fffffffu;
constexpr uint32_t kInfBits = 0x7f800000u;

// |x| as bits, with NaN counted as +inf. Unsigned order of these bits is the order of the numbers, so an integer
// maximum over them is the amax, whatever the order of the reduction.
JAXFP8_HD uint32_t AmaxBits(float x) {
  const uint32_t bits = FloatToBits(x) & kAbsMask;
  return bits < kInfBits ? bits : kInfBits;
}

// Rounds y to the nearest FP8 value, ties to even. |y| above the largest value, infinity included, saturates.
// NaN gives kNanCode, without a sign.
template <class Format>
JAXFP8_HD uint8_t Encode(float y) {
  constexpr int kShift = 23 - Format::kMantissaBits;
  constexpr uint32_t kMinNormalBits = static_cast<uint32_t>(127 + 1 - Format::kExponentBias) << 23;
  // One unit in the last place of kMagic is the smallest FP8 subnormal: adding it rounds y to a multiple of that.
  constexpr uint32_t kMagicBits = static_cast<uint32_t>(127 + 1 - Format::kExponentBias + kShift) << 23;

  const uint32_t bits = FloatToBits(y);
  const uint32_t magnitude = bits & kAbsMask;
  const uint32_t sign = (bits >> 24) & 0x80u;
  if (magnitude > kInfBits) return Format::kNanCode;
  uint32_t code;
  if (magnitude >= Format::kMaxBits) {
    code = Format::kMaxCode;
  } else if (magnitude < kMinNormalBits) {
    code = FloatToBits(BitsToFloat(magnitude) + BitsToFloat(kMagicBits)) - kMagicBits;
  } else {
    const uint32_t odd = (magnitude >> kShift) & 1u;
    const uint32_t rounded = (magnitude + ((1u << (kShift - 1)) - 1u) + odd) >> kShift;
    code = rounded - (static_cast<uint32_t>(127 - Format::kExponentBias) << Format::kMantissaBits);
  }
  return static_cast<uint8_t>(sign | code);
}

// encode(x * scale), one multiplication in f32. A finite x saturates even where x * scale overflows; a non-finite x
// stays visible as NaN. The caller makes sure that subnormal x are not flushed before the multiplication.
template <class Format>
JAXFP8_HD uint8_t Quantize(float x, float scale) {
  if ((FloatToBits(x) & kAbsMask) >= kInfBits) return Format::kNanCode;
  return Encode<Format>(x * scale);
}

// Exact: every FP8 value is a normal float, a zero, an infinity or NaN.
template <class Format>
JAXFP8_HD float Decode(uint8_t code) {
  constexpr int kShift = 23 - Format::kMantissaBits;
  // The exponent of the smallest FP8 subnormal, as a float.
  constexpr uint32_t kMinSubnormalBits =
      static_cast<uint32_t>(127 + 1 - Format::kExponentBias - Format::kMantissaBits) << 23;
  const uint32_t sign = static_cast<uint32_t>(code & 0x80u) << 24;
  const uint32_t magnitude = code & 0x7fu;
  if (Format::IsNan(code)) return BitsToFloat(sign | 0x7fc00000u);
  if (Format::IsInf(code)) return BitsToFloat(sign | kInfBits);
  if (magnitude < (1u << Format::kMantissaBits)) {  // subnormal: an integer times the smallest one
    return BitsToFloat(sign | FloatToBits(static_cast<float>(magnitude) * BitsToFloat(kMinSubnormalBits)));
  }
  const uint32_t bits =
      (magnitude << kShift) + (static_cast<uint32_t>(127 - Format::kExponentBias) << 23);
  return BitsToFloat(sign | bits);
}

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_FP8_H_
