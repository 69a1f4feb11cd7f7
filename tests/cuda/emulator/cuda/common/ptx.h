// Stands in for cuda/common/ptx.h: the same functions, computed as the PTX ISA manual defines the instructions.
#ifndef JAXFP8_TESTS_CUDA_EMULATOR_PTX_H_
#define JAXFP8_TESTS_CUDA_EMULATOR_PTX_H_

#include <cstdint>
#include <cstring>

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

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_TESTS_CUDA_EMULATOR_PTX_H_
