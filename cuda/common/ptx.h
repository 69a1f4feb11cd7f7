// The PTX the kernels use, one instruction a function. Everything else is plain CUDA C++.
//
// FP8 conversions need sm_89. `.satfinite` turns infinities into the largest finite value and NaN into 0x7f, in both
// formats. In a packed result the first operand of the instruction is the high half.
#ifndef JAXFP8_CUDA_COMMON_PTX_H_
#define JAXFP8_CUDA_COMMON_PTX_H_

#include <cstdint>

#include "common/dispatch.h"
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

// The larger magnitudes of packed floats; NaN where either is NaN. The signs of 16-bit results mean nothing.
template <class T>
__device__ __forceinline__ uint32_t LargerMagnitudes(uint32_t a, uint32_t b);

template <>
__device__ __forceinline__ uint32_t LargerMagnitudes<BF16>(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

template <>
__device__ __forceinline__ uint32_t LargerMagnitudes<F16>(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

// Not with .xorsign: of two of these sm_100 makes one instruction.
template <>
__device__ __forceinline__ uint32_t LargerMagnitudes<F32>(uint32_t a, uint32_t b) {
  uint32_t larger;
  asm("{ .reg .f32 a, b; abs.f32 a, %1; abs.f32 b, %2; max.NaN.f32 %0, a, b; }" : "=r"(larger) : "r"(a), "r"(b));
  return larger;
}

// The same packed elements, but NaN for an infinity: x * 0 + x.
template <class T>
__device__ __forceinline__ uint32_t InfinitiesToNan(uint32_t x);

#define JAXFP8_INFINITIES_TO_NAN(T, suffix)                                             \
  template <>                                                                           \
  __device__ __forceinline__ uint32_t InfinitiesToNan<T>(uint32_t x) {                  \
    uint32_t sum;                                                                       \
    asm("fma.rn." suffix " %0, %1, %2, %1;" : "=r"(sum) : "r"(x), "r"(0));              \
    return sum;                                                                         \
  }
JAXFP8_INFINITIES_TO_NAN(BF16, "bf16x2")
JAXFP8_INFINITIES_TO_NAN(F16, "f16x2")
JAXFP8_INFINITIES_TO_NAN(F32, "f32")
#undef JAXFP8_INFINITIES_TO_NAN

// The smaller and the larger number; NaN where either is NaN.
__device__ __forceinline__ float Smaller(float x, float y) {
  float smaller;
  asm("min.NaN.f32 %0, %1, %2;" : "=f"(smaller) : "f"(x), "f"(y));
  return smaller;
}

__device__ __forceinline__ float Larger(float x, float y) {
  float larger;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(x), "f"(y));
  return larger;
}

// 2^x to 2 ulp. Subnormal results are 0, above 2^128 infinity.
__device__ __forceinline__ float Exp2(float x) {
  float power;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x));
  return power;
}

// 1 / x to 1 ulp. Subnormal results, of |x| above 2^126, are zeros.
__device__ __forceinline__ float Reciprocal(float x) {
  float quotient;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(quotient) : "f"(x));
  return quotient;
}

// 1 / sqrt(x), off by 2^-22.9 of it at most. Of subnormal x it is infinity.
__device__ __forceinline__ float ReciprocalRoot(float x) {
  float result;
  asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
  return result;
}

// A product rounded once, and then brought into [0, 1].
__device__ __forceinline__ float ProductUpToOne(float x, float y) {
  float product;
  asm("mul.rn.sat.f32 %0, %1, %2;" : "=f"(product) : "f"(x), "f"(y));
  return product;
}

__device__ __forceinline__ void ReadGlobal16(const void* address, uint32_t (&words)[4]) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "l"(__cvta_generic_to_global(address)));
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

// Where `is_inside`. A predicate and no branch: what it takes to find the address is not repeated in each branch.
__device__ __forceinline__ void StoreGlobal8If(bool is_inside, void* address, uint32_t w0, uint32_t w1) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %3, 0; @p st.global.v2.u32 [%0], {%1, %2};}"
               :
               : "l"(__cvta_generic_to_global(address)), "r"(w0), "r"(w1), "r"(static_cast<uint32_t>(is_inside)));
}

__device__ __forceinline__ void StoreGlobal4If(bool is_inside, void* address, uint32_t word) {
  asm volatile("{.reg .pred p; setp.ne.u32 p, %2, 0; @p st.global.u32 [%0], %1;}"
               :
               : "l"(__cvta_generic_to_global(address)), "r"(word), "r"(static_cast<uint32_t>(is_inside)));
}

__device__ __forceinline__ void StoreShared16(void* address, uint32_t w0, uint32_t w1, uint32_t w2, uint32_t w3) {
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};"
               :
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(address))), "r"(w0), "r"(w1), "r"(w2), "r"(w3)
               : "memory");
}

// Of `table`, which lies at a multiple of 1024 in shared memory, the float at an offset of fewer bytes.
__device__ __forceinline__ float LoadSharedAt(const float* table, uint32_t bytes) {
  float value;
  asm("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(table)) | bytes));
  return value;
}

// The shared memory that LaunchWithShared gives a block, from a multiple of 1024 on.
template <int kBytes>
__device__ __forceinline__ uint8_t* DynamicShared() {
  extern __shared__ __align__(1024) uint8_t dynamic_shared[];
  return dynamic_shared;
}

// 16 bytes to shared memory without waiting: the first `count` from `source`, then zeros. Both addresses are multiples
// of 16.
__device__ __forceinline__ void CopyAsync16(void* shared, const void* source, int count) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
               :
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "l"(__cvta_generic_to_global(source)),
                 "r"(count)
               : "memory");
}

// 4 bytes likewise, at addresses that are multiples of 4.
__device__ __forceinline__ void CopyAsync4(void* shared, const void* source) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;"
               :
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(shared))), "l"(__cvta_generic_to_global(source))
               : "memory");
}

// Ends a group of this thread's copies.
__device__ __forceinline__ void CommitCopies() { asm volatile("cp.async.commit_group;" : : : "memory"); }

// Until at most the kPending latest groups of this thread's copies are under way.
template <int kPending>
__device__ __forceinline__ void WaitForCopies() {
  asm volatile("cp.async.wait_group %0;" : : "n"(kPending) : "memory");
}

// Four 8 x 16 matrices of bytes from shared memory. Lane i gives the address of row i % 8 of matrix i / 8; it gets, of each
// matrix, bytes 4 (i % 4) to 4 (i % 4) + 3 of row i / 4.
__device__ __forceinline__ void LoadMatrices(const void* row, uint32_t (&words)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(words[0]), "=r"(words[1]), "=r"(words[2]), "=r"(words[3])
               : "r"(static_cast<uint32_t>(__cvta_generic_to_shared(row)))
               : "memory");
}

// sum [16, 8] += a [16, 32] @ b [8, 32]^T, over a warp. With g = lane / 4 and t = lane % 4: a[0..3] are rows g, g + 8, g and
// g + 8, elements 4t to 4t + 3 of the first 16 twice, then of the last 16; b[0..1] row g of both halves; sum[0..3]
// columns 2t and 2t + 1 of row g, then of row g + 8.
// Ada adds with about 13 bits of mantissa. Hopper has no such instruction: it is compiled to f16 ones with f32 sums.
template <class A, class B>
__device__ __forceinline__ void MultiplyFp8(float (&sum)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]);

#define JAXFP8_MULTIPLY_FP8(A, B, types)                                                                     \
  template <>                                                                                                \
  __device__ __forceinline__ void MultiplyFp8<A, B>(float(&sum)[4], const uint32_t(&a)[4],                   \
                                                    const uint32_t(&b)[2]) {                                 \
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32." types                                              \
                 ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"                      \
                 : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])                                    \
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));                        \
  }
JAXFP8_MULTIPLY_FP8(E4M3, E4M3, "e4m3.e4m3")
JAXFP8_MULTIPLY_FP8(E4M3, E5M2, "e4m3.e5m2")
JAXFP8_MULTIPLY_FP8(E5M2, E4M3, "e5m2.e4m3")
JAXFP8_MULTIPLY_FP8(E5M2, E5M2, "e5m2.e5m2")
#undef JAXFP8_MULTIPLY_FP8

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_COMMON_PTX_H_
