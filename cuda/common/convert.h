// Conversions of a few elements in registers, with exactly the results of common/fp8.h.
//
// The hardware rounds and saturates as fp8.h does, subnormals and signed zeros included. It differs for non-finite
// values only, and only there do these functions add work.
#ifndef JAXFP8_CUDA_COMMON_CONVERT_H_
#define JAXFP8_CUDA_COMMON_CONVERT_H_

#include <cstdint>

#include "common/dispatch.h"
#include "common/fp8.h"
#include "cuda/common/ptx.h"

namespace jaxfp8::cuda {

// Element `i` of packed words, as f32. `i` must be a compile-time constant after unrolling.
template <class T>
__device__ __forceinline__ float Widen(const uint32_t* words, int i);

template <>
__device__ __forceinline__ float Widen<F32>(const uint32_t* words, int i) {
  return BitsToFloat(words[i]);
}

template <>
__device__ __forceinline__ float Widen<BF16>(const uint32_t* words, int i) {
  return BitsToFloat(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
}

template <>
__device__ __forceinline__ float Widen<F16>(const uint32_t* words, int i) {
  return F16ToFloat(static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2))));
}

// Multiplies by a scale, and turns infinities into NaN on the way. A plain product cannot tell an infinite x, whose
// code is NaN, from a finite x whose product overflows and saturates. Adding x * 0 can: it is NaN for a non-finite x,
// and for a finite one a zero with the sign of the product, which changes nothing, not even the sign of a zero.
class Multiplier {
 public:
  __device__ __forceinline__ explicit Multiplier(float scale) : scale_(scale), zero_(copysignf(0.0f, scale)) {}
  __device__ __forceinline__ float operator()(float x) const { return __fmaf_rn(x, scale_, __fmul_rn(x, zero_)); }

 private:
  float scale_;
  float zero_;
};

// The hardware's NaN is 0x7f in both formats: canonical in e4m3, not in e5m2. Acts on four codes at once.
template <class Format>
JAXFP8_HD uint32_t CanonicalNanCodes(uint32_t codes);

template <>
JAXFP8_HD uint32_t CanonicalNanCodes<E4M3>(uint32_t codes) {
  return codes;
}

template <>
JAXFP8_HD uint32_t CanonicalNanCodes<E5M2>(uint32_t codes) {
  // Magnitudes above 0x7c carry into bit 7 of their byte.
  const uint32_t is_nan = (((codes & 0x7f7f7f7fu) + 0x03030303u) >> 7) & 0x01010101u;
  return (codes & ~(is_nan * 0xffu)) | (is_nan * E5M2::kNanCode);
}

// The codes of four numbers that were multiplied by their scales; none is NaN.
template <class Format>
__device__ __forceinline__ uint32_t RoundFourNumbers(float y0, float y1, float y2, float y3) {
  const uint32_t low = FloatsToFp8x2<Format>(y0, y1);
  const uint32_t high = FloatsToFp8x2<Format>(y2, y3);
  return low | (high << 16);
}

// The same, of NaN too.
template <class Format>
__device__ __forceinline__ uint32_t RoundFour(float y0, float y1, float y2, float y3) {
  return CanonicalNanCodes<Format>(RoundFourNumbers<Format>(y0, y1, y2, y3));
}

template <class Format>
__device__ __forceinline__ uint32_t QuantizeFour(float x0, float x1, float x2, float x3, const Multiplier& multiply) {
  return RoundFour<Format>(multiply(x0), multiply(x1), multiply(x2), multiply(x3));
}

// Code `i` of packed words, as f32.
template <class Format>
__device__ __forceinline__ float WidenCode(const uint32_t* words, int i) {
  const uint32_t halves = Fp8x2ToF16x2<Format>(static_cast<uint16_t>(words[i / 4] >> (16 * (i / 2 % 2))));
  return F16ToFloat(static_cast<uint16_t>(halves >> (16 * (i % 2))));
}

// Replaces every NaN of two packed 16-bit floats by `kNan`; `kInf` is the format's infinity.
template <uint32_t kInf, uint32_t kNan>
JAXFP8_HD uint32_t CanonicalNanHalves(uint32_t halves) {
  // Magnitudes above infinity carry into bit 15 of their half.
  const uint32_t is_nan = (((halves & 0x7fff7fffu) + (0x7fffu - kInf) * 0x00010001u) >> 15) & 0x00010001u;
  return (halves & ~(is_nan * 0xffffu)) | (is_nan * kNan);
}

// Rounds one word's worth of values: two for the 16-bit types, `low` alone for f32. NaN becomes the positive quiet NaN.
template <class T>
__device__ __forceinline__ uint32_t Narrow(float low, float high);

template <>
__device__ __forceinline__ uint32_t Narrow<BF16>(float low, float high) {
  return CanonicalNanHalves<0x7f80u, 0x7fc0u>(FloatsToBF16x2(low, high));
}

template <>
__device__ __forceinline__ uint32_t Narrow<F16>(float low, float high) {
  return CanonicalNanHalves<0x7c00u, 0x7e00u>(FloatsToF16x2(low, high));
}

template <>
__device__ __forceinline__ uint32_t Narrow<F32>(float low, float) {
  return (FloatToBits(low) & kAbsMask) > kInfBits ? 0x7fc00000u : FloatToBits(low);
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_COMMON_CONVERT_H_
