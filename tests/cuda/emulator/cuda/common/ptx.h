// Stands in for cuda/common/ptx.h: the same functions, computed as the PTX ISA manual defines the instructions.
#ifndef JAXFP8_TESTS_CUDA_EMULATOR_PTX_H_
#define JAXFP8_TESTS_CUDA_EMULATOR_PTX_H_

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "common/dispatch.h"
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

// Of f32, canonical NaN included.
inline uint32_t LargerMagnitude(uint32_t a, uint32_t b) {
  a &= kAbsMask, b &= kAbsMask;
  return a > kInfBits || b > kInfBits ? 0x7fffffffu : max(a, b);
}

// Of 16-bit floats, with the product of their signs, as the instruction gives it.
inline uint32_t LargerHalf(uint32_t a, uint32_t b, uint32_t inf) {
  const uint32_t sign = (a ^ b) & 0x8000u;
  a &= 0x7fffu, b &= 0x7fffu;
  return a > inf || b > inf ? 0x7fffu : sign | max(a, b);
}

template <class T>
uint32_t LargerMagnitudes(uint32_t a, uint32_t b) {
  if constexpr (std::is_same_v<T, F32>) return LargerMagnitude(a, b);
  constexpr uint32_t kInf = std::is_same_v<T, BF16> ? 0x7f80u : 0x7c00u;
  return LargerHalf(a & 0xffffu, b & 0xffffu, kInf) | LargerHalf(a >> 16, b >> 16, kInf) << 16;
}

template <class T>
uint32_t InfinitiesToNan(uint32_t x) {
  const auto half = [](uint32_t element, uint32_t inf) { return (element & 0x7fffu) < inf ? element : 0x7fffu; };
  if constexpr (std::is_same_v<T, F32>) return (x & kAbsMask) < kInfBits ? x : 0x7fffffffu;
  constexpr uint32_t kInf = std::is_same_v<T, BF16> ? 0x7f80u : 0x7c00u;
  return half(x & 0xffffu, kInf) | half(x >> 16, kInf) << 16;
}

// NaN where either is NaN.
inline float Smaller(float x, float y) { return x != x || y != y ? BitsToFloat(0x7fffffffu) : std::fmin(x, y); }
inline float Larger(float x, float y) { return -Smaller(-x, -y); }

// 0 for what would be subnormal.
inline float Flushed(float x) { return (FloatToBits(x) & kInfBits) == 0 ? std::copysign(0.0f, x) : x; }

// `exact`, off by the most units in the last place that the manual allows, up or down, as ErrorOfExp2 says; where that
// is 0, x decides.
inline float Off(float exact, float x, int32_t units, int direction) {
  exact = Flushed(exact);
  if (exact == 0 || !(exact <= std::numeric_limits<float>::max() / 2)) return exact;
  if (direction == 0) direction = FloatToBits(x) % 2 == 0 ? 1 : -1;
  return Flushed(BitsToFloat(FloatToBits(exact) + static_cast<uint32_t>(direction * units)));
}

inline float Exp2(float x) {
  return Off(static_cast<float>(std::exp2(static_cast<double>(x))), x, 2, ErrorOfExp2());
}

// The other way than Exp2, so that 1 / (1 + exp(-z)) is at its ends.
inline float Reciprocal(float x) { return Off(1.0f / x, x, 1, -ErrorOfExp2()); }

// 2^-22.9 is 2 units in the last place, and a seventh.
inline float ReciprocalRoot(float x) {
  return Off(static_cast<float>(1.0 / std::sqrt(static_cast<double>(Flushed(x)))), x, 2, ErrorOfExp2());
}

// NaN becomes 0.
inline float ProductUpToOne(float x, float y) {
  const float product = x * y;
  return product > 0 ? std::min(product, 1.0f) : 0.0f;
}

// The real one has an address of 1024 times a number, and adds by bits.
inline float LoadSharedAt(const float* table, uint32_t bytes) {
  if (bytes % 4 != 0 || bytes >= 1024) CountMisaligned();
  return table[bytes / 4];
}

inline void ReadGlobal16(const void* address, uint32_t (&words)[4]) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) CountMisaligned();
  std::memcpy(words, address, sizeof(words));
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

template <int kBytes>
uint8_t* DynamicShared() {
  alignas(1024) static uint8_t bytes[kBytes];
  return bytes;
}

inline void CopyAsync16(void* shared, const void* source, int count) {
  if (reinterpret_cast<uintptr_t>(shared) % 16 != 0 || reinterpret_cast<uintptr_t>(source) % 16 != 0) CountMisaligned();
  StartCopy(shared, source, 16, count);
}

inline void CopyAsync4(void* shared, const void* source) {
  if (reinterpret_cast<uintptr_t>(shared) % 4 != 0 || reinterpret_cast<uintptr_t>(source) % 4 != 0) CountMisaligned();
  StartCopy(shared, source, 4, 4);
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

// One addition of Ada's and Hopper's tensor cores, the least precise that the kernels meet: no term keeps bits below 2**-13
// of the largest power of two among them, and the result keeps 13 bits after its first. tests/oracle/accumulation.py is the
// model. The first term is the sum so far.
template <int kTerms>
double AddTruncated(const double (&terms)[kTerms], const int (&exponents)[kTerms]) {
  constexpr int kBits = 13;
  const auto cut = [](double x, int last) { return std::ldexp(std::trunc(std::ldexp(x, -last)), last); };
  int largest = std::numeric_limits<int>::min();
  double exact = 0;
  for (int i = 0; i < kTerms; ++i) {
    exact += terms[i];
    if (terms[i] != 0 && exponents[i] > largest) largest = exponents[i];
  }
  if (!std::isfinite(exact)) return exact;
  double total = 0;
  for (double term : terms) total += term != 0 ? cut(term, largest - kBits) : 0;
  return total != 0 ? cut(total, std::ilogb(total) - kBits) : 0;
}

// The exponent that the hardware reads from a code: subnormal ones have that of the smallest normal number.
template <class Format>
int CodeExponent(float value) {
  return value != 0 ? std::max(std::ilogb(value), 1 - Format::kExponentBias) : 0;
}

// 32 products: two additions of 16 and the sum so far.
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
    for (int half = 0; half < 2; ++half) {
      double terms[17] = {sum[i]};
      int exponents[17] = {terms[0] != 0 ? std::ilogb(terms[0]) : 0};
      for (int k = 0; k < 16; ++k) {
        const uint32_t a_word = fragments(row, k).a[row / 8 + half * 2];
        const uint32_t b_word = fragments(column, k).b[half];
        const float x = Decode<A>(static_cast<uint8_t>(a_word >> (8 * (k % 4))));
        const float y = Decode<B>(static_cast<uint8_t>(b_word >> (8 * (k % 4))));
        terms[k + 1] = double{x} * double{y};
        exponents[k + 1] = CodeExponent<A>(x) + CodeExponent<B>(y);
      }
      sum[i] = static_cast<float>(AddTruncated(terms, exponents));
    }
  }
  WarpSync();
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_TESTS_CUDA_EMULATOR_PTX_H_
