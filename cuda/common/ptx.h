// The PTX the kernels use, one instruction a function. Everything else is plain CUDA C++.
//
// FP8 conversions need sm_89. `.satfinite` turns infinities into the largest finite value and NaN into 0x7f, in both
// formats. In a packed result the first operand of the instruction is the high half.
#ifndef JAXFP8_CUDA_COMMON_PTX_H_
#define JAXFP8_CUDA_COMMON_PTX_H_

#include <cstdint>

#include "common/fp8.h"

namespace jaxfp8::cuda {

template <class Format>
__device__ __forceinline__ uint16_t FloatsToFp8x2(float low, float high);

template <>
__device__ __forceinline__ uint16_t FloatsToFp8x2<E4M3>(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

template <>
__device__ __forceinline__ uint16_t FloatsToFp8x2<E5M2>(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// Exact: every FP8 value, infinities and NaN included, is an f16 value.
template <class Format>
__device__ __forceinline__ uint32_t Fp8x2ToF16x2(uint16_t pair);

template <>
__device__ __forceinline__ uint32_t Fp8x2ToF16x2<E4M3>(uint16_t pair) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  return halves;
}

template <>
__device__ __forceinline__ uint32_t Fp8x2ToF16x2<E5M2>(uint16_t pair) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(pair));
  return halves;
}

__device__ __forceinline__ float F16ToFloat(uint16_t half) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(half));
  return value;
}

__device__ __forceinline__ uint32_t FloatsToF16x2(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ __forceinline__ uint32_t FloatsToBF16x2(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

// Without a memory clobber, so that loads of other memory may move across.
__device__ __forceinline__ void StoreGlobal16(void* address, uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "l"(__cvta_generic_to_global(address)), "r"(w0), "r"(w1), "r"(w2), "r"(w3));
}

__device__ __forceinline__ void StoreGlobal8(void* address, uint32_t w0, uint32_t w1) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" : : "l"(__cvta_generic_to_global(address)), "r"(w0), "r"(w1));
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_COMMON_PTX_H_
