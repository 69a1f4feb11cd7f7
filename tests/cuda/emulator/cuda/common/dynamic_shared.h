// Stands in for cuda/common/dynamic_shared.h: there a block's memory is declared in a way that only nvcc understands.
#ifndef JAXFP8_TESTS_CUDA_EMULATOR_DYNAMIC_SHARED_H_
#define JAXFP8_TESTS_CUDA_EMULATOR_DYNAMIC_SHARED_H_

#include <cstdint>
#include <cstring>

#include "cuda/common/memory.h"
#include "cuda_runtime.h"

namespace jaxfp8::cuda {

inline uint8_t* DynamicShared() { return SharedOfBlock(); }

template <int kBytes>
Bytes<kBytes> LoadShared(const void* address) {
  if (reinterpret_cast<uintptr_t>(address) % kBytes != 0) CountMisaligned();
  Bytes<kBytes> value;
  std::memcpy(value.words, address, kBytes);
  return value;
}

inline void StoreShared(void* address, const Bytes<16>& value) {
  if (reinterpret_cast<uintptr_t>(address) % 16 != 0) CountMisaligned();
  std::memcpy(address, value.words, 16);
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_TESTS_CUDA_EMULATOR_DYNAMIC_SHARED_H_
