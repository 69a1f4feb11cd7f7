// Products by a warpgroup, four warps, of FP8 matrices in shared memory. Only H100s and H200s have the instructions, and
// only code for sm_90a may hold them.
//
// A product runs beside its threads: its operands may not be overwritten, nor its sums read, until WaitForProducts.
#ifndef JAXFP8_CUDA_COMMON_WARPGROUP_H_
#define JAXFP8_CUDA_COMMON_WARPGROUP_H_

#include <cstdint>

#include "common/fp8.h"

namespace jaxfp8::cuda {

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupRows = 64;  // of a product
constexpr int kWarpgroupDepth = 32;  // elements of the contraction that an instruction takes
constexpr int kSwizzledRow = 128;    // bytes

// Where chunk `chunk`, of 16 bytes, of row `row` is in a matrix whose rows are 128 bytes: the tensor cores' "128-byte
// swizzle". Eight rows of one chunk are in different banks. The matrix begins at a multiple of 1024.
JAXFP8_HD int SwizzledOffset(int row, int chunk) { return row * kSwizzledRow + ((chunk ^ (row & 7)) * 16); }

// The rows of such a matrix, from a row on whose number is a multiple of eight.
class SwizzledRows {
 public:
  // PTX ISA, "Asynchronous Warpgroup Level Matrix Shared Memory Layout": the address in units of 16 bytes, the distance
  // between groups of eight rows likewise from bit 32 on, and 1 in the highest two bits for this swizzle.
  __device__ __forceinline__ explicit SwizzledRows(const uint8_t* first)
      : descriptor_((static_cast<uint64_t>(__cvta_generic_to_shared(first)) & 0x3ffff) >> 4 |
                    uint64_t{8 * kSwizzledRow / 16} << 32 | uint64_t{1} << 62) {}

  // From element `element` of each row on, a multiple of kWarpgroupDepth.
  __device__ __forceinline__ uint64_t From(int element) const { return descriptor_ + element / 16; }

 private:
  uint64_t descriptor_;
};

// Lets the tensor cores see what this thread wrote to shared memory, by copies too. A barrier has to follow.
__device__ __forceinline__ void ShowToTensorCores() { asm volatile("fence.proxy.async.shared::cta;" : : : "memory"); }

// Comes before the first product after the threads have used its sums.
__device__ __forceinline__ void BeginProducts() { asm volatile("wgmma.fence.sync.aligned;" : : : "memory"); }

// Ends a group of products.
__device__ __forceinline__ void CommitProducts() { asm volatile("wgmma.commit_group.sync.aligned;" : : : "memory"); }

// Until at most the kPending latest groups of products are under way.
template <int kPending>
__device__ __forceinline__ void WaitForProducts() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" : : "n"(kPending) : "memory");
}

// Comes after the wait, so that the compiler moves no use of the sums before it.
template <int kSums>
__device__ __forceinline__ void UseSums(float (&sums)[kSums]) {
#pragma unroll
  for (float& sum : sums) asm volatile("" : "+f"(sum) : : "memory");
}

// sums [64, kColumns] += a [64, 32] @ b [kColumns, 32]^T, or = without `adds`, beside the threads. With w the warp in its
// warpgroup, g = lane / 4 and t = lane % 4: sums[4 j + c] is column 8 j + 2 t + c % 2 of row 16 w + g + 8 (c / 2).
// Hopper adds with about 13 bits of mantissa. kSums is half of the columns.
template <class A, class B, int kSums>
struct Product;

template <class A, class B, int kSums>
__device__ __forceinline__ void StartProduct(float (&sums)[kSums], uint64_t a, uint64_t b, bool adds) {
  Product<A, B, kSums>::Start(sums, a, b, adds);
}

#define JAXFP8_SUMS_4(i) "+f"(sums[i]), "+f"(sums[i + 1]), "+f"(sums[i + 2]), "+f"(sums[i + 3])
#define JAXFP8_SUMS_16(i) JAXFP8_SUMS_4(i), JAXFP8_SUMS_4(i + 4), JAXFP8_SUMS_4(i + 8), JAXFP8_SUMS_4(i + 12)
#define JAXFP8_SUMS_48(i) JAXFP8_SUMS_16(i), JAXFP8_SUMS_16(i + 16), JAXFP8_SUMS_16(i + 32)
#define JAXFP8_SUMS_64(i) JAXFP8_SUMS_48(i), JAXFP8_SUMS_16(i + 48)
#define JAXFP8_SUMS_96(i) JAXFP8_SUMS_48(i), JAXFP8_SUMS_48(i + 48)
#define JAXFP8_SUMS_128(i) JAXFP8_SUMS_64(i), JAXFP8_SUMS_64(i + 64)
#define JAXFP8_EIGHT(t) "%" #t "0, %" #t "1, %" #t "2, %" #t "3, %" #t "4, %" #t "5, %" #t "6, %" #t "7"
#define JAXFP8_TEN(t) JAXFP8_EIGHT(t) ", %" #t "8, %" #t "9, "
#define JAXFP8_NAMES_48 \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, " JAXFP8_TEN(1) JAXFP8_TEN(2) JAXFP8_TEN(3) JAXFP8_EIGHT(4)
#define JAXFP8_NAMES_64 JAXFP8_NAMES_48 ", %48, %49, " JAXFP8_TEN(5) "%60, %61, %62, %63"
#define JAXFP8_NAMES_96 \
  JAXFP8_NAMES_64 ", %64, %65, %66, %67, %68, %69, " JAXFP8_TEN(7) JAXFP8_TEN(8) "%90, %91, %92, %93, %94, %95"
#define JAXFP8_NAMES_128 JAXFP8_NAMES_96 ", %96, %97, %98, %99, " JAXFP8_TEN(10) JAXFP8_TEN(11) JAXFP8_EIGHT(12)
// The last two are the operands after the sums, by number.
#define JAXFP8_PRODUCT(A, B, types, kSums, columns, a_and_b, adds_or_not)                                            \
  template <>                                                                                                        \
  struct Product<A, B, kSums> {                                                                                      \
    static __device__ __forceinline__ void Start(float(&sums)[kSums], uint64_t a, uint64_t b, bool adds) {           \
      asm volatile("{.reg .pred p; setp.ne.u32 p, " adds_or_not ", 0; wgmma.mma_async.sync.aligned.m64n" columns      \
                   "k32.f32." types " {" JAXFP8_NAMES_##kSums "}, " a_and_b ", p, 1, 1;}"                            \
                   : JAXFP8_SUMS_##kSums(0)                                                                          \
                   : "l"(a), "l"(b), "r"(static_cast<uint32_t>(adds)));                                              \
    }                                                                                                                \
  };
#define JAXFP8_PRODUCTS(A, B, types)                              \
  JAXFP8_PRODUCT(A, B, types, 48, "96", "%48, %49", "%50")        \
  JAXFP8_PRODUCT(A, B, types, 64, "128", "%64, %65", "%66")       \
  JAXFP8_PRODUCT(A, B, types, 96, "192", "%96, %97", "%98")       \
  JAXFP8_PRODUCT(A, B, types, 128, "256", "%128, %129", "%130")
JAXFP8_PRODUCTS(E4M3, E4M3, "e4m3.e4m3")
JAXFP8_PRODUCTS(E4M3, E5M2, "e4m3.e5m2")
JAXFP8_PRODUCTS(E5M2, E4M3, "e5m2.e4m3")
JAXFP8_PRODUCTS(E5M2, E5M2, "e5m2.e5m2")
#undef JAXFP8_PRODUCTS
#undef JAXFP8_PRODUCT
#undef JAXFP8_NAMES_128
#undef JAXFP8_NAMES_96
#undef JAXFP8_NAMES_64
#undef JAXFP8_NAMES_48
#undef JAXFP8_TEN
#undef JAXFP8_EIGHT
#undef JAXFP8_SUMS_128
#undef JAXFP8_SUMS_96
#undef JAXFP8_SUMS_64
#undef JAXFP8_SUMS_48
#undef JAXFP8_SUMS_16
#undef JAXFP8_SUMS_4

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_COMMON_WARPGROUP_H_
