// Shared memory of a size that the launch decides: where it is, and access to it in one instruction each.
#ifndef JAXFP8_CUDA_COMMON_DYNAMIC_SHARED_H_
#define JAXFP8_CUDA_COMMON_DYNAMIC_SHARED_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/memory.h"

namespace jaxfp8::cuda {

__device__ __forceinline__ uint8_t* DynamicShared() {
  extern __shared__ uint4 dynamic_shared[];  // aligned to 16 bytes
  return reinterpret_cast<uint8_t*>(dynamic_shared);
}

// `address` is a multiple of kBytes.
template <int kBytes>
__device__ __forceinline__ Bytes<kBytes> LoadShared(const void* address) {
  static_assert(kBytes == 8 || kBytes == 16, "one instruction");
  if constexpr (kBytes == 16) {
    const uint4 value = *static_cast<const uint4*>(address);
    return {{value.x, value.y, value.z, value.w}};
  } else {
    const uint2 value = *static_cast<const uint2*>(address);
    return {{value.x, value.y}};
  }
}

__device__ __forceinline__ void StoreShared(void* address, const Bytes<16>& value) {
  *static_cast<uint4*>(address) = make_uint4(value.words[0], value.words[1], value.words[2], value.words[3]);
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_COMMON_DYNAMIC_SHARED_H_
