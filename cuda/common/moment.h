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
#include "cuda/common/ptx.h"
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

// Plain numbers are zeros and those of which no product of a step or of an encoding is subnormal, flushed or infinite:
// from 2^-76 to 2^30. Nearly all blocks have no others, and take half of the instructions.
constexpr uint32_t kLeastPlainBits = (127u - 76) << 23, kMostPlainBits = (127u + 30) << 23;

// As Root of 0 and of what is above 2^-96, but 2^-63 of 0: what ptxas makes of sqrt.rn, without a branch for others.
__device__ __forceinline__ float PlainRoot(float x) {
  x = fmaxf(x, 0x1p-126f);
  const float reciprocal = ReciprocalRoot(x), root = __fmul_rn(x, reciprocal), half = __fmul_rn(reciprocal, 0.5f);
  return __fmaf_rn(__fmaf_rn(-root, root, x), half, root);
}

// As Divide of numbers whose quotient is far from the ends of the range: what ptxas makes of div.rn.
__device__ __forceinline__ float PlainQuotient(float x, float y) {
  const float approximate = Reciprocal(y);
  const float reciprocal = __fmaf_rn(approximate, __fmaf_rn(-y, approximate, 1.0f), approximate);
  const float quotient = __fmul_rn(x, reciprocal);
  return __fmaf_rn(reciprocal, __fmaf_rn(-y, quotient, x), quotient);
}

// What the codes stand for, by the exponent: a root, a fraction, a square; or NaN. There are 128 codes, or 256: with a
// sign. The numbers of an exponent lie at a multiple of their size.
template <int kCodes>
class alignas(4 * kCodes) Fractions {
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

// For each exponent, how codes are rounded.
class CodeSteps {
 public:
  __device__ __forceinline__ void Fill() {
#pragma unroll 1
    for (int i = threadIdx.x; i < 3 * 128; i += kBlockSize) steps_[i] = DecodeStep(i % 128, i / 128 - 1);
  }
  __device__ __forceinline__ const CodeStep* Of(int exponent) const {
    return steps_ + (exponent > 0 ? 2 : exponent < 0 ? 0 : 1) * 128;
  }

 private:
  CodeStep steps_[3 * 128];
};

// Whether something is so for a lane of the warp.
__device__ __forceinline__ bool IsAny(bool is_so) { return __reduce_max_sync(kAllLanes, is_so ? 1u : 0u) != 0; }

// The largest of the lanes of a block.
__device__ __forceinline__ uint32_t OverBlock(uint32_t x) {
#pragma unroll
  for (int lanes = 1; lanes < kLanes; lanes *= 2) x = max(x, __shfl_xor_sync(kAllLanes, x, lanes));
  return x;
}

// What the first of the lanes of a block has.
__device__ __forceinline__ uint32_t OfFirst(uint32_t x) {
  return __shfl_sync(kAllLanes, x, threadIdx.x % kWarpSize / kLanes * kLanes);
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

// The code of a magnitude of a block; `inverse` is that of the amax. Without kRoots the exponent is not negative. With
// kPlain the numbers of the block are plain.
template <bool kPlain, bool kRoots, bool kRandom, bool kSquared>
__device__ __forceinline__ uint32_t EncodeMagnitude(float x, const Factor& inverse, int exponent, const CodeStep* steps,
                                                    uint32_t random) {
  float u;
  if constexpr (kPlain) {
    u = ProductUpToOne(fabsf(x), inverse.lifted);
  } else {
    const float quotient = inverse * x;
    u = quotient < 1.0f ? quotient : 1.0f;
  }
  float power = exponent > 0 ? __fmul_rn(u, u) : u;
  // A plain root of 0 is below the smallest code.
  if constexpr (kRoots) power = exponent < 0 ? (kPlain ? PlainRoot(u) : Root(u)) : power;
  const float y = __fmul_rn(kMomentMax, power);
  uint32_t code;
  if constexpr (kRandom) {
    code = kSquared ? RoundSquare(y, exponent, random) : RoundSigned(u, y, random, [&](int32_t i) { return steps[i]; });
  } else {
    code = Encode<E4M3>(y);
  }
  // With another exponent all codes of squares are those of normal numbers.
  if (kSquared && (kRoots || !kPlain) && fabsf(x) >= 0x1p-126f) code = max(code, 1u);
  return kPlain || fabsf(x) < BitsToFloat(kInfBits) ? code : E4M3::kNanCode;
}

// The codes of four elements of a lane, of which the first is element `first`.
template <bool kPlain, bool kRoots, bool kRandom, bool kSquared>
__device__ __forceinline__ uint32_t EncodeVector(const uint32_t (&x)[kVector], const Factor& inverse, int exponent,
                                                 const CodeStep* steps, const RandomBits& random_bits, int first) {
  uint32_t codes[kVector];
#pragma unroll
  for (int i = 0; i < kVector; ++i) {
    codes[i] = EncodeMagnitude<kPlain, kRoots, kRandom, kSquared>(BitsToFloat(x[i]), inverse, exponent, steps,
                                                                  random_bits[first + i]);
  }
  const auto bytes = [](const uint32_t (&of)[kVector], uint32_t pair) {
    return __byte_perm(__byte_perm(of[0], of[1], pair), __byte_perm(of[2], of[3], pair), 0x5410);
  };
  // Plain squares have no sign.
  return bytes(codes, 0x40) | (kPlain && kSquared ? 0 : bytes(x, 0x73) & 0x80808080u);
}

// A block as it is encoded: its amax and its exponent, which all lanes of a warp find together, and then the codes.
template <bool kPlain, bool kRandom, bool kSquared>
struct MomentEncoder {
  float top;
  int exponent;
  bool is_plain;

  __device__ __forceinline__ void Find(const Floats& x) {
    // Less the bits of infinity, those of finite numbers wrap around and are the largest. Less those of the smallest
    // normal number, those of zeros and subnormal numbers are. Plain numbers are less than infinity and more than 0,
    // and their bits are doubled for their sign.
    constexpr uint32_t from_top = kPlain ? 0 : kInfBits, from_bottom = kPlain ? 1 : kSmallestNormalBits;
    constexpr int shift = kPlain && !kSquared ? 1 : 0;
    uint32_t largest = kPlain ? 0 : kSmallestNormalBits - 1 - from_top;
    uint32_t smallest = kPlain ? ~0u : kInfBits - from_bottom;
#pragma unroll
    for (const Bytes<4 * kVector>& vector : x) {
#pragma unroll
      for (const uint32_t bits : vector.words) {
        const uint32_t magnitude = kPlain ? bits << shift : bits & kAbsMask;
        largest = max(largest, magnitude - from_top);
        smallest = min(smallest, magnitude - from_bottom);
      }
    }
    largest = (OverBlock(largest) >> shift) + from_top;
    smallest = ~OverBlock(~smallest) >> shift;
    is_plain = kPlain && smallest >= kLeastPlainBits - from_bottom && largest <= kMostPlainBits;
    top = largest < kSmallestNormalBits ? 0.0f : BitsToFloat(largest);
    // In a plain block of zeros it is 0 or -0.
    exponent = ExponentOfSpan<kSquared>(top, BitsToFloat(smallest + from_bottom));
  }

  // Whether a block of the warp has roots.
  __device__ __forceinline__ bool AnyRoots() const { return IsAny(exponent < 0); }

  // `key` is that of the block; `steps` are those of the exponent.
  __device__ __forceinline__ void Encode(const Floats& x, const CodeStep* steps, uint32_t key, bool any_roots,
                                         Codes& codes) const {
    RandomBits random_bits(key);
    random_bits.Skip(threadIdx.x % kLanes * kVector);
    // 1. The inverse of the amax: of one above 1, of the amax times 2^-32, since that of the largest is subnormal. CPUs
    // multiply elements by 2^-32 too, and flush those below 2^-94.
    const bool large = !kPlain && top > 1.0f;
    const float divisor = fmaxf(__fmul_rn(top, large ? 0x1p-32f : 1.0f), 0x1p-126f);
    const float divided = kPlain ? PlainQuotient(1.0f, divisor) : Divide(1.0f, divisor);
    const Factor inverse(__fmul_rn(divided, large ? 0x1p32f : 1.0f), large, large ? 0x1p-94f : 0x1p-126f);
    // 2. Round.
    const auto encode = [&](auto roots) {
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        codes[v] = EncodeVector<kPlain, decltype(roots)::value, kRandom, kSquared>(x[v].words, inverse, exponent, steps,
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
