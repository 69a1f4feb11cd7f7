// Arithmetic on one word of packed elements: two bf16, two f16 or one f32. One instruction a function.
#ifndef JAXFP8_CUDA_COMMON_PACKED_H_
#define JAXFP8_CUDA_COMMON_PACKED_H_

#include <cstdint>

#include "common/dispatch.h"

namespace jaxfp8::cuda {

// The larger magnitude of each pair of elements, with any sign; NaN where one of them is.
template <class T>
__device__ __forceinline__ uint32_t LargerMagnitudes(uint32_t a, uint32_t b);

// The same elements, but NaN for an infinity: x * 0 + x.
template <class T>
__device__ __forceinline__ uint32_t InfinitiesToNan(uint32_t x);

#define JAXFP8_PACKED(T, suffix)                                                                       \
  template <>                                                                                          \
  __device__ __forceinline__ uint32_t LargerMagnitudes<T>(uint32_t a, uint32_t b) {                    \
    uint32_t larger;                                                                                   \
    asm("max.NaN.xorsign.abs." suffix " %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));                 \
    return larger;                                                                                     \
  }                                                                                                    \
  template <>                                                                                          \
  __device__ __forceinline__ uint32_t InfinitiesToNan<T>(uint32_t x) {                                 \
    uint32_t sum;                                                                                      \
    asm("fma.rn." suffix " %0, %1, %2, %1;" : "=r"(sum) : "r"(x), "r"(0));                             \
    return sum;                                                                                        \
  }
JAXFP8_PACKED(BF16, "bf16x2")
JAXFP8_PACKED(F16, "f16x2")
JAXFP8_PACKED(F32, "f32")
#undef JAXFP8_PACKED

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_COMMON_PACKED_H_
