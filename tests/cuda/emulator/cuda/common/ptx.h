// Stands in for cuda/common/ptx.h: the same functions, computed as the PTX ISA manual defines the instructions.
#ifndef JAXFP8_TESTS_CUDA_EMULATOR_PTX_H_
#define JAXFP8_TESTS_CUDA_EMULATOR_PTX_H_

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "common/fp8.h"
#include "cuda_runtime.h"

namespace jaxfp8::cuda {

// NaN becomes 0x7f in both formats, infinities the largest value.
template <class Format>
uint16_t FloatsToFp8x2(float low, float high) {
  const auto code = [](float x) -> uint16_t { return x != x ? 0x7f : Encode<Format>(x); };
  return static_cast<uint16_t>(code(low) | (code(high) << 8));
}

inline uint16_t FloatToF16Bits(float x) {
  if (x != x) return 0x7fff;
  const _Float16 half = static_cast<_Float16>(x);
  uint16_t bits;
  std::memcpy(&bits, &half, sizeof(bits));
  return bits;
}

inline uint16_t FloatToBF16Bits(float x) {
  if (x != x) return 0x7fff;
  const uint32_t bits = FloatToBits(x);
  return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1u)) >> 16);
}

template <class Format>
uint32_t Fp8x2ToF16x2(uint16_t pair) {
  const uint32_t low = FloatToF16Bits(Decode<Format>(static_cast<uint8_t>(pair)));
  const uint32_t high = FloatToF16Bits(Decode<Format>(static_cast<uint8_t>(pair >> 8)));
  return low | (high << 16);
}

inline float F16ToFloat(uint16_t bits) {
  _Float16 half;
  std::memcpy(&half, &bits, sizeof(bits));
  return static_cast<float>(half);
}

inline uint32_t FloatsToF16x2(float low, float high) {
  return FloatToF16Bits(low) | (uint32_t{FloatToF16Bits(high)} << 16);
}

inline uint32_t FloatsToBF16x2(float low, float high) {
  return FloatToBF16Bits(low) | (uint32_t{FloatToBF16Bits(high)} << 16);
}

// 0 for what would be subnormal.
inline float Flushed(float x) { return (FloatToBits(x) & kInfBits) == 0 ? std::copysign(0.0f, x) : x; }

// The worst that the manual allows, in one direction or the other: two units in the last place.
inline float Exp2(float x) {
  const float power = Flushed(static_cast<float>(std::exp2(static_cast<double>(x))));
  if (power == 0 || power > std::numeric_limits<float>::max() / 2 || power != power) return power;
  return BitsToFloat(FloatToBits(power) + (FloatToBits(x) % 2 == 0 ? 2u : -2u));
}

// Likewise one unit.
inline float Reciprocal(float x) {
  const float quotient = Flushed(1.0f / x);
  if (quotient == 0 || quotient > std::numeric_limits<float>::max() || quotient != quotient) return quotient;
  return BitsToFloat(FloatToBits(quotient) + (FloatToBits(x) % 2 == 0 ? 1u : -1u));
}

inline void StoreGlobal16(void* address, uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) CountMisaligned();
  const uint32_t words[] = {w0, w1, w2, w3};
  std::memcpy(address, words, sizeof(words));
}

inline void StoreGlobal8(void* address, uint32_t w0, uint32_t w1) {
  if (reinterpret_cast<uintptr_t>(address) % 8 != 0) CountMisaligned();
  const uint32_t words[] = {w0, w1};
  std::memcpy(address, words, sizeof(words));
}

inline void StoreGlobal8If(bool is_inside, void* address, uint32_t w0, uint32_t w1) {
  if (is_inside) StoreGlobal8(address, w0, w1);
}

inline void StoreGlobal4If(bool is_inside, void* address, uint32_t word) {
  if (!is_inside) return;
  if (reinterpret_cast<uintptr_t>(address) % 4 != 0) CountMisaligned();
  std::memcpy(address, &word, sizeof(word));
}

inline void StoreShared16(void* address, uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3) {
  StoreGlobal16(address, w0, w1, w2, w3);
}

inline void CopyAsync16(void* shared, const void* source, int count) {
  if (reinterpret_cast<uintptr_t>(shared) % 16 != 0 || reinterpret_cast<uintptr_t>(source) % 16 != 0) CountMisaligned();
  StartCopy(shared, source, 16, count);
}

inline void CommitCopies() { EndCopyGroup(); }

template <int kPending>
void WaitForCopies() {
  WaitForCopyGroups(kPending);
}

inline void LoadMatrices(const void* row, uint32_t (&words)[4]) {
  if (reinterpret_cast<uintptr_t>(row) % 16 != 0) CountMisaligned();
  const void* rows[32];
  WarpShare(row, rows);
  const int lane = static_cast<int>(threadIdx.x % 32);
  for (int matrix = 0; matrix < 4; ++matrix) {
    std::memcpy(&words[matrix], static_cast<const uint8_t*>(rows[8 * matrix + lane / 4]) + 4 * (lane % 4), 4);
  }
  WarpSync();
}

// The sum so far loses all but 13 bits of its mantissa, as on Ada; 32 products are added to it as one.
template <class A, class B>
void MultiplyFp8(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  struct Fragments {
    uint32_t a[4], b[2];
  };
  const Fragments mine = {{a[0], a[1], a[2], a[3]}, {b[0], b[1]}};
  const void* all[32];
  WarpShare(&mine, all);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const auto fragments = [&](int row, int k) -> const Fragments& {
    return *static_cast<const Fragments*>(all[row % 8 * 4 + k % 16 / 4]);
  };
  for (int i = 0; i < 4; ++i) {
    const int row = lane / 4 + i / 2 * 8;
    const int column = lane % 4 * 2 + i % 2;
    double total = BitsToFloat(FloatToBits(sum[i]) & ~((1u << 10) - 1));
    for (int k = 0; k < 32; ++k) {
      const uint32_t a_word = fragments(row, k).a[row / 8 + k / 16 * 2];
      const uint32_t b_word = fragments(column, k).b[k / 16];
      total += double{Decode<A>(static_cast<uint8_t>(a_word >> (8 * (k % 4))))} *
               double{Decode<B>(static_cast<uint8_t>(b_word >> (8 * (k % 4))))};
    }
    sum[i] = static_cast<float>(total);
  }
  WarpSync();
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_TESTS_CUDA_EMULATOR_PTX_H_
