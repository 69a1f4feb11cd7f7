// One amax that several threads raise: an integer maximum over float bits, so their order does not matter.
#ifndef JAXFP8_CPU_KERNELS_AMAX_CELL_H_
#define JAXFP8_CPU_KERNELS_AMAX_CELL_H_

#include <cstdint>
#include <cstring>

namespace jaxfp8::cpu {

inline void ClearAmax(float* amax, int64_t groups) { memset(amax, 0, groups * sizeof(float)); }

// Where the amax is raised from: zeros if there is none so far. XLA gives a result and the operand that it aliases one
// buffer where it can, and then there is nothing to do; nor is there without an amax.
inline void StartAmax(float* amax, const float* amax_so_far, int64_t count) {
  if (amax == nullptr || amax == amax_so_far) return;
  if (amax_so_far == nullptr) return ClearAmax(amax, count);
  memcpy(amax, amax_so_far, count * sizeof(float));
}

// `bits` as AmaxBits (fp8.h) gives them. Compiler builtins, because the cell is XLA's memory and not a std::atomic.
inline void RaiseAmax(float* cell, uint32_t bits) {
  uint32_t* address = reinterpret_cast<uint32_t*>(cell);
  uint32_t current = __atomic_load_n(address, __ATOMIC_RELAXED);
  while (current < bits &&
         !__atomic_compare_exchange_n(address, &current, bits, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
  }
}

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_AMAX_CELL_H_
