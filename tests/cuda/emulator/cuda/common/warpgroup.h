// Stands in for cuda/common/warpgroup.h: the same functions, computed as the PTX ISA manual defines the instructions. A
// product is made when it starts.
#ifndef JAXFP8_TESTS_CUDA_EMULATOR_WARPGROUP_H_
#define JAXFP8_TESTS_CUDA_EMULATOR_WARPGROUP_H_

#include <cstdint>

#include "cuda/common/ptx.h"

namespace jaxfp8::cuda {

constexpr int kWarpgroupThreads = 128;
constexpr int kWarpgroupRows = 64;
constexpr int kWarpgroupDepth = 32;
constexpr int kSwizzledRow = 128;

inline int SwizzledOffset(int row, int chunk) { return row * kSwizzledRow + ((chunk ^ (row & 7)) * 16); }

class SwizzledRows {
 public:
  explicit SwizzledRows(const uint8_t* first) : first_(reinterpret_cast<uintptr_t>(first)) {
    if (first_ % 1024 != 0) CountMisaligned();
  }
  uint64_t From(int element) const { return first_ + static_cast<uint64_t>(element); }

 private:
  uint64_t first_;
};

inline void ShowToTensorCores() {}
inline void BeginProducts() {}
inline void CommitProducts() {}
template <int kPending>
void WaitForProducts() {}
template <int kSums>
void UseSums(float (&)[kSums]) {}

// The swizzle exchanges bits of addresses: those of the chunk and those of the row.
inline uint8_t SwizzledByte(uint64_t start, int row, int element) {
  const uint64_t address = start + static_cast<uint64_t>(row * kSwizzledRow + element);
  return *reinterpret_cast<const uint8_t*>(address ^ (address >> 7 & 7) << 4);
}

template <class A, class B, int kSums>
void StartProduct(float (&sums)[kSums], uint64_t a, uint64_t b, bool adds) {
  const int warp = static_cast<int>(threadIdx.x % kWarpgroupThreads / 32), lane = static_cast<int>(threadIdx.x % 32);
  float rows[2][kWarpgroupDepth];
  for (int half = 0; half < 2; ++half) {
    for (int k = 0; k < kWarpgroupDepth; ++k) rows[half][k] = Decode<A>(SwizzledByte(a, 16 * warp + lane / 4 + 8 * half, k));
  }
  for (int i = 0; i < kSums; ++i) {
    const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
    double terms[kWarpgroupDepth + 1] = {adds ? sums[i] : 0.0f};
    int exponents[kWarpgroupDepth + 1] = {terms[0] != 0 ? std::ilogb(terms[0]) : 0};
    for (int k = 0; k < kWarpgroupDepth; ++k) {
      const float x = rows[i % 4 / 2][k], y = Decode<B>(SwizzledByte(b, column, k));
      terms[k + 1] = double{x} * double{y};
      exponents[k + 1] = CodeExponent<A>(x) + CodeExponent<B>(y);
    }
    sums[i] = static_cast<float>(AddTruncated(terms, exponents));
  }
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_TESTS_CUDA_EMULATOR_WARPGROUP_H_
