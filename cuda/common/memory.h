// Loads from and stores to device memory of 1 to 16 bytes, as one instruction each.
#ifndef JAXFP8_CUDA_COMMON_MEMORY_H_
#define JAXFP8_CUDA_COMMON_MEMORY_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/ptx.h"

namespace jaxfp8::cuda {

// `kBytes` bytes in registers. Fewer than four are the low bytes of the one word.
template <int kBytes>
struct Bytes {
  uint32_t words[(kBytes + 3) / 4];
};

// From device memory, at an `address` that is a multiple of kBytes and in memory that no thread of the kernel writes.
// Neither __ldg nor the stores below are ever split by the compiler, as plain accesses through vector pointers are.
template <int kBytes>
__device__ __forceinline__ Bytes<kBytes> Load(const void* address) {
  static_assert(kBytes == 1 || kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16, "one instruction");
  if constexpr (kBytes == 16) {
    const uint4 value = __ldg(static_cast<const uint4*>(address));
    return {{value.x, value.y, value.z, value.w}};
  } else if constexpr (kBytes == 8) {
    const uint2 value = __ldg(static_cast<const uint2*>(address));
    return {{value.x, value.y}};
  } else if constexpr (kBytes == 4) {
    return {{__ldg(static_cast<const unsigned int*>(address))}};
  } else if constexpr (kBytes == 2) {
    return {{__ldg(static_cast<const unsigned short*>(address))}};
  } else {
    return {{__ldg(static_cast<const unsigned char*>(address))}};
  }
}

// From device memory that the kernel may write, at an `address` that is a multiple of 16.
__device__ __forceinline__ Bytes<16> LoadWritten16(const void* address) {
  Bytes<16> bytes;
  ReadGlobal16(address, bytes.words);
  return bytes;
}

// To device memory, at an `address` that is a multiple of kBytes and in memory that no thread of the kernel reads.
template <int kBytes>
__device__ __forceinline__ void Store(void* address, const Bytes<kBytes>& value) {
  static_assert(kBytes == 1 || kBytes == 2 || kBytes == 4 || kBytes == 8 || kBytes == 16, "one instruction");
  if constexpr (kBytes == 16) {
    StoreGlobal16(address, value.words[0], value.words[1], value.words[2], value.words[3]);
  } else if constexpr (kBytes == 8) {
    StoreGlobal8(address, value.words[0], value.words[1]);
  } else if constexpr (kBytes == 4) {
    *static_cast<uint32_t*>(address) = value.words[0];
  } else if constexpr (kBytes == 2) {
    *static_cast<uint16_t*>(address) = static_cast<uint16_t>(value.words[0]);
  } else {
    *static_cast<uint8_t*>(address) = static_cast<uint8_t>(value.words[0]);
  }
}

inline bool IsAligned(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_COMMON_MEMORY_H_
