// Moments in FP8 on a GPU: eight lanes take a block of 128 elements, so that what is done once a block is shared by 16
// elements.
//
// The four blocks of a warp may have three exponents. So an exponent is an operand, not a branch, and what codes stand for
// is read from a table in shared memory, without the roots.
#ifndef JAXFP8_CUDA_COMMON_MOMENT_H_
#define JAXFP8_CUDA_COMMON_MOMENT_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/moment.h"
#include "common/scale.h"
#include "cuda/common/memory.h"
#include "cuda/common/stream_plan.h"

namespace jaxfp8::cuda {

constexpr int kVector = 4;  // elements in a row of a lane: 16 bytes
constexpr int kVectors = 4;
constexpr int kLanes = kMomentBlock / (kVector * kVectors);  // of a block
constexpr int kSpan = kVector * kLanes;                      // elements from one vector of a lane to its next
constexpr int kMomentsOfWarp = kWarpSize / kLanes;           // blocks
constexpr uint32_t kAllLanes = 0xffffffffu;

// The elements of a lane, as bits, and their codes, one a byte.
using Floats = Bytes<4 * kVector>[kVectors];
using Codes = uint32_t[kVectors];

// A factor of all magnitudes of a block. CPUs flush a product that is below 2^-126 once it is rounded to 24 bits. GPUs
// round it as a subnormal number, so a factor that could make one is taken times 2^64, and the product back. The product
// of a magnitude below `least` is 0.
struct Factor {
  float lifted;
  float threshold;
  float lower;

  __device__ __forceinline__ Factor(float factor, bool lift, float least)
      : lifted(factor), threshold(fmaxf(least * factor, lift ? 0x1p-62f : 0.0f)), lower(lift ? 0x1p-64f : 1.0f) {}
  __device__ __forceinline__ float operator*(float x) const {
    const float product = __fmul_rn(fabsf(x), lifted);
    return product >= threshold ? __fmul_rn(product, lower) : 0.0f;
  }
};

// What the codes stand for, by the exponent: a root, a fraction, a square; or NaN. There are 128 codes, or 256: with a
// sign.
template <int kCodes>
class Fractions {
 public:
  __device__ __forceinline__ void Fill() {
#pragma unroll 1
    for (int i = threadIdx.x; i < 3 * kCodes; i += kBlockSize) {
      const bool is_nan = E4M3::IsNan(i % kCodes);
      const float fraction = is_nan ? BitsToFloat(0x7fc00000u) : DecodeFraction(i % 128, i / kCodes - 1);
      fractions_[i] = i % kCodes < 128 ? fraction : -fraction;
    }
  }
  __device__ __forceinline__ const float* Of(int exponent) const {
    return fractions_ + (exponent > 0 ? 2 : exponent < 0 ? 0 : 1) * kCodes;
  }

 private:
  float fractions_[3 * kCodes];
};

// The largest of the lanes of a block.
__device__ __forceinline__ uint32_t OverBlock(uint32_t x) {
#pragma unroll
  for (int lanes = 1; lanes < kLanes; lanes *= 2) x = max(x, __shfl_xor_sync(kAllLanes, x, lanes));
  return x;
}

// The codes of a lane, which it or no lane writes. From element `count` on, counted from the first of the lane, there are
// zeros. With kWide, vectors of a lane are whole and aligned.
template <bool kWide>
__device__ __forceinline__ void ReadCodes(const uint8_t* data, int count, Codes& codes) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    codes[v] = 0;
    // Not by Load: it may be written.
    if (kWide && v * kSpan < count) codes[v] = *reinterpret_cast<const uint32_t*>(data + v * kSpan);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (kWide || v * kSpan + i >= count) continue;
      codes[v] |= static_cast<uint32_t>(data[v * kSpan + i]) << (8 * i);
    }
  }
}

template <bool kWide>
__device__ __forceinline__ void WriteCodes(uint8_t* data, int count, const Codes& codes) {
#pragma unroll
  for (int v = 0; v < kVectors; ++v) {
    if (kWide && v * kSpan < count) Store<4>(data + v * kSpan, {{codes[v]}});
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      if (!kWide && v * kSpan + i < count) data[v * kSpan + i] = static_cast<uint8_t>(codes[v] >> (8 * i));
    }
  }
}

// The code of a magnitude of a block; `inverse` is that of the amax. Without kRoots the exponent is not negative.
template <bool kRoots, bool kRandom, bool kSquared>
__device__ __forceinline__ uint32_t EncodeMagnitude(float x, const Factor& inverse, int exponent, const float* fractions,
                                                    uint32_t random) {
  const float quotient = inverse * x;
  const float u = quotient < 1.0f ? quotient : 1.0f;
  float power = exponent > 0 ? __fmul_rn(u, u) : u;
  if constexpr (kRoots) power = exponent < 0 ? Root(u) : power;
  const float y = __fmul_rn(kMomentMax, power);
  uint32_t code;
  if constexpr (kRandom) {
    const auto decode = [&](int32_t code) { return fractions[code]; };
    code = kSquared ? RoundSquare(y, exponent, random) : RoundSigned(u, y, random, decode);
  } else {
    code = Encode<E4M3>(y);
  }
  if (kSquared && fabsf(x) >= 0x1p-126f) code = max(code, 1u);
  return fabsf(x) < BitsToFloat(kInfBits) ? code : E4M3::kNanCode;
}

// The codes of four elements of a lane, of which the first is element `first`.
template <bool kRoots, bool kRandom, bool kSquared>
__device__ __forceinline__ uint32_t EncodeVector(const uint32_t (&x)[kVector], const Factor& inverse, int exponent,
                                                 const float* fractions, const RandomBits& random_bits, int first) {
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    const uint32_t code = EncodeMagnitude<kRoots, kRandom, kSquared>(BitsToFloat(x[i]), inverse, exponent, fractions,
                                                                     random_bits[first + i]);
    codes |= code << (8 * i);
  }
  const uint32_t signs = __byte_perm(__byte_perm(x[0], x[1], 0x73), __byte_perm(x[2], x[3], 0x73), 0x5410);
  return codes | (signs & 0x80808080u);
}

// A block as it is encoded: its amax and its exponent, which all lanes of a warp find together, and then the codes.
template <bool kRandom, bool kSquared>
struct MomentEncoder {
  float top;
  int exponent;
  bool any_roots;  // in the warp

  __device__ __forceinline__ explicit MomentEncoder(const Floats& x) {
    // Less the bits of infinity, those of finite numbers wrap around and are the largest. Less those of the smallest
    // normal number, those of zeros and subnormal numbers are.
    uint32_t largest = kSmallestNormalBits - 1 - kInfBits, smallest = kInfBits - kSmallestNormalBits;
#pragma unroll
    for (const Bytes<4 * kVector>& vector : x) {
#pragma unroll
      for (const uint32_t bits : vector.words) {
        largest = max(largest, (bits & kAbsMask) - kInfBits);
        smallest = min(smallest, (bits & kAbsMask) - kSmallestNormalBits);
      }
    }
    largest = OverBlock(largest) + kInfBits;
    top = largest < kSmallestNormalBits ? 0.0f : BitsToFloat(largest);
    const float bottom = BitsToFloat(~OverBlock(~smallest) + kSmallestNormalBits);
    exponent = ExponentOfSpan<kSquared>(top, bottom);
    any_roots = __reduce_max_sync(kAllLanes, exponent < 0 ? 1u : 0u) != 0;
  }

  // `key` is that of the block; `fractions` are those of the exponent.
  __device__ __forceinline__ void Encode(const Floats& x, const float* fractions, uint32_t key, Codes& codes) const {
    RandomBits random_bits(key);
    random_bits.Skip(threadIdx.x % kLanes * kVector);
    // 1. The inverse of the amax: of one above 1, of the amax times 2^-32, since that of the largest is subnormal. CPUs
    // multiply elements by 2^-32 too, and flush those below 2^-94.
    const bool large = top > 1.0f;
    const float divided = Divide(1.0f, fmaxf(__fmul_rn(top, large ? 0x1p-32f : 1.0f), 0x1p-126f));
    const Factor inverse(__fmul_rn(divided, large ? 0x1p32f : 1.0f), large, large ? 0x1p-94f : 0x1p-126f);
    // 2. Round.
    const auto encode = [&](auto roots) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        codes[v] = EncodeVector<decltype(roots)::value, kRandom, kSquared>(x[v].words, inverse, exponent, fractions,
                                                                           random_bits, v * kSpan);
      }
    };
    if (any_roots) {
      encode(std::true_type{});
    } else {
      encode(std::false_type{});
    }
  }
};

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_COMMON_MOMENT_H_
