// The loops over moments in FP8, written once for all instruction sets: compilers vectorise them.
//
// Included by loops.h, and subject to what it says. They run inside a ScopedFlush (float_env.h), as the same arithmetic
// in jnp does; what compares magnitudes does so in integers.
#ifndef JAXFP8_CPU_KERNELS_MOMENT_LOOPS_H_
#define JAXFP8_CPU_KERNELS_MOMENT_LOOPS_H_

#include <cstdint>
#include <cstring>

#include "common/adam.h"
#include "common/fp8.h"
#include "common/moment.h"
#include "common/params.h"
#include "cpu/kernels/rounding.h"

namespace jaxfp8::cpu {
namespace {

constexpr int32_t kSmallestNormal = kSmallestNormalBits, kInfinity = kInfBits;

template <int kExponent>
float DecodeElement(uint8_t code, float amax) {
  const uint32_t magnitude = code & 0x7fu;
  const uint32_t bits = FloatToBits(DecodeFraction(magnitude, kExponent) * amax);
  return BitsToFloat((magnitude == E4M3::kNanCode ? 0x7fc00000u : bits) ^ (code & 0x80u) << 24);
}

template <int kExponent>
void DecodeElements(const uint8_t* codes, float amax, float* out, int64_t size) {
  for (int64_t i = 0; i < size; ++i) out[i] = DecodeElement<kExponent>(codes[i], amax);
}

void DecodeBlock(const uint8_t* codes, float amax, int8_t exponent, float* out, int64_t size) {
  const auto decode = exponent > 0 ? DecodeElements<1> : exponent < 0 ? DecodeElements<-1> : DecodeElements<0>;
  decode(codes, amax, out, size);
}

// Whether a block decodes to the bits of x. Most that do not differ early.
bool IsSame(const uint8_t* codes, float amax, int8_t exponent, const float* x) {
  constexpr int64_t kPart = 32;
  for (int64_t begin = 0; begin < kMomentBlock; begin += kPart) {
    float decoded[kPart];
    DecodeBlock(codes + begin, amax, exponent, decoded, kPart);
    if (memcmp(decoded, x + begin, sizeof(decoded)) != 0) return false;
  }
  return true;
}

// The number in e4m3 that is nearest to y in [0, 448], as rounding.h has it.
inline int32_t RoundToNearest(float y) {
  using R = Rounding<E4M3>;
  constexpr int32_t kMinNormal = R::kMinNormalBits;
  const int32_t exponent = FloatToBits(y) & kInfBits, e = exponent > kMinNormal ? exponent : kMinNormal;
  return (FloatToBits(BitsToFloat(e + R::kMagic) + y) + (e >> R::kShift)) & 0x7f;
}

template <int kExponent, bool kRandom, bool kSquared>
void EncodeElements(const float* x, float unit, float inverse, uint32_t key, uint8_t* codes) {
  const RandomBits random_bits(key);
  for (int64_t i = 0; i < kMomentBlock; ++i) {
    const int32_t bits = static_cast<int32_t>(FloatToBits(x[i]));
    const int32_t magnitude = bits & static_cast<int32_t>(kAbsMask);
    const bool finite = magnitude < kInfinity;
    const float quotient = BitsToFloat(finite ? magnitude : 0) * unit * inverse;
    const float u = quotient < 1 ? quotient : 1;
    const float y = kMomentMax * Power(u, kExponent);
    int32_t code;
    if constexpr (kRandom) {
      const uint32_t random = random_bits[static_cast<uint32_t>(i)];
      const auto step = [](int32_t code) { return DecodeStep(code, kExponent); };
      code = kSquared ? RoundSquare(y, kExponent, random) : RoundSigned(u, y, random, step);
    } else {
      code = RoundToNearest(y);
    }
    const int32_t least = kSquared && magnitude >= kSmallestNormal ? 1 : 0;
    code = code > least ? code : least;
    codes[i] = static_cast<uint8_t>((finite ? code : E4M3::kNanCode) | (bits >> 24 & 0x80));
  }
}

template <bool kRandom, bool kSquared>
void EncodeBlock(const float* x, uint32_t key, uint8_t* codes, float* amax, int8_t* exponent) {
  // 1. The span of the block, of numbers that are neither zero nor flushed to it.
  int32_t largest = 0, least = kInfinity;
  for (int64_t i = 0; i < kMomentBlock; ++i) {
    const int32_t magnitude = FloatToBits(x[i]) & kAbsMask;
    const bool is_number = magnitude >= kSmallestNormal && magnitude < kInfinity;
    const int32_t high = is_number ? magnitude : 0, low = is_number ? magnitude : kInfinity;
    largest = high > largest ? high : largest;
    least = low < least ? low : least;
  }
  // 2. The exponent that it allows.
  const float top = BitsToFloat(largest);
  *amax = top;
  *exponent = static_cast<int8_t>(ExponentOfSpan<kSquared>(top, BitsToFloat(least)));
  // 3. The inverse of an amax above 2^126 would be subnormal.
  const float unit = top > 1 ? 0x1p-32f : 1.0f, scaled = top * unit;
  const float inverse = 1 / (scaled > 0x1p-126f ? scaled : 0x1p-126f);
  const auto encode = *exponent > 0   ? EncodeElements<1, kRandom, kSquared>
                      : *exponent < 0 ? EncodeElements<-1, kRandom, kSquared>
                                      : EncodeElements<0, kRandom, kSquared>;
  encode(x, unit, inverse, key, codes);
}

// A step of Adam on up to a block of elements. The moments are replaced by those after it.
template <bool kApply>
void AdamElements(const AdamHyper& hyper, const float* grads, const float* params, float* __restrict mu,
                  float* __restrict nu, float* __restrict out, int64_t size) {
  for (int64_t i = 0; i < size; ++i) {
    const float grad = AdamGrad(hyper, grads[i]);
    const float next_mu = NextMu(hyper, mu[i], grad), next_nu = NextNu(hyper, nu[i], grad);
    const float update = AdamUpdate(hyper, next_mu, next_nu);
    out[i] = kApply ? AdamApply(hyper, update, params[i]) : update;
    mu[i] = EncodedMu(next_mu);
    nu[i] = EncodedNu(next_nu);
  }
}

// Calls visit(block, offset of its first element, number of elements) for the blocks [begin, end) of all rows.
template <class Visitor>
void ForEachMomentBlock(int64_t n, int64_t begin, int64_t end, const Visitor& visit) {
  const int64_t across = n / kMomentBlock + (n % kMomentBlock != 0);
  int64_t row = begin / across, column = begin % across * kMomentBlock;
  for (int64_t block = begin; block < end; ++block) {
    visit(block, row * n + column, n - column < kMomentBlock ? n - column : kMomentBlock);
    column += kMomentBlock;
    if (column >= n) ++row, column = 0;
  }
}

void DecodeMomentBlocks(const DecodeMomentParams& params, int64_t begin, int64_t end) {
  ForEachMomentBlock(params.n, begin, end, [&](int64_t block, int64_t offset, int64_t size) {
    DecodeBlock(params.data + offset, params.amax[block], params.exponent[block], params.out + offset, size);
  });
}

void EncodeMomentBlocks(const EncodeMomentParams& params, int64_t begin, int64_t end) {
  const bool random = params.keys != nullptr;
  const auto encode = params.squared ? (random ? EncodeBlock<true, true> : EncodeBlock<false, true>)
                                     : (random ? EncodeBlock<true, false> : EncodeBlock<false, false>);
  ForEachMomentBlock(params.n, begin, end, [&](int64_t block, int64_t offset, int64_t size) {
    const uint8_t* old = params.data + offset;
    const float* x = params.after + offset;
    uint8_t* codes = params.next_data + offset;
    // Zeros fill the last block of a row up: they have the code 0, and do not count in its span.
    float padded_x[kMomentBlock];
    uint8_t padded_old[kMomentBlock], padded_codes[kMomentBlock];
    if (size < kMomentBlock) {
      memset(padded_x, 0, sizeof(padded_x));
      memset(padded_old, 0, sizeof(padded_old));
      x = static_cast<float*>(memcpy(padded_x, x, size * sizeof(float)));
      old = static_cast<uint8_t*>(memcpy(padded_old, old, size));
      codes = padded_codes;
    }
    float amax = params.amax[block];
    int8_t exponent = params.exponent[block];
    if (IsSame(old, amax, exponent, x)) {
      memmove(params.next_data + offset, params.data + offset, size);
    } else {
      encode(x, random ? params.keys[block] : 0, codes, &amax, &exponent);
      if (size < kMomentBlock) memcpy(params.next_data + offset, codes, size);
    }
    params.next_amax[block] = amax;
    params.next_exponent[block] = exponent;
  });
}

// The code of a whole block, or of one that has fewer elements and is filled up with zeros.
template <bool kSquared>
void EncodeAdamBlock(const AdamMoment& moment, int64_t block, int64_t offset, int64_t size, const float* x) {
  uint8_t padded[kMomentBlock];
  uint8_t* codes = size < kMomentBlock ? padded : moment.next_data + offset;
  EncodeBlock<true, kSquared>(x, moment.keys[block], codes, moment.next_amax + block, moment.next_exponent + block);
  if (size < kMomentBlock) memcpy(moment.next_data + offset, padded, size);
}

template <bool kApply>
void AdamLeafBlocks(const AdamLeaf& leaf, int64_t begin, int64_t end) {
  ForEachMomentBlock(leaf.n, begin, end, [&](int64_t block, int64_t offset, int64_t size) {
    AdamHyper hyper;
    memcpy(&hyper, leaf.hyper + offset / leaf.n / leaf.rows_per_hyper * kAdamHypers, sizeof(hyper));
    alignas(64) float mu[kMomentBlock], nu[kMomentBlock], out[kMomentBlock];
    if (size < kMomentBlock) {
      memset(mu, 0, sizeof(mu));
      memset(nu, 0, sizeof(nu));
    }
    const uint8_t* nu_codes = leaf.nu.data + offset;
    DecodeBlock(leaf.mu.data + offset, leaf.mu.amax[block], leaf.mu.exponent[block], mu, size);
    DecodeBlock(nu_codes, leaf.nu.amax[block], leaf.nu.exponent[block], nu, size);
    for (int64_t i = 0; i < size; ++i) nu[i] = nu_codes[i] == 0xff ? BitsToFloat(kInfBits) : nu[i];
    AdamElements<kApply>(hyper, leaf.grads + offset, kApply ? leaf.params + offset : nullptr, mu, nu, out, size);
    memcpy(leaf.out + offset, out, size * sizeof(float));
    EncodeAdamBlock<false>(leaf.mu, block, offset, size, mu);
    EncodeAdamBlock<true>(leaf.nu, block, offset, size, nu);
  });
}

void AdamUpdateBlocks(const AdamLeaf& leaf, int64_t begin, int64_t end) {
  (leaf.params != nullptr ? AdamLeafBlocks<true> : AdamLeafBlocks<false>)(leaf, begin, end);
}

}  // namespace
}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_MOMENT_LOOPS_H_
