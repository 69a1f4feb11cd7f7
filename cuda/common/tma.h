// Copies of boxes of a tensor to shared memory by Hopper's copy engine (TMA), and the barriers that say when bytes have
// arrived. A barrier lies in shared memory and has phases: one ends when as many threads have arrived as it was made for and
// as many bytes as were expected, and the next begins. Phases alternate between parity 0, the first one, and 1.
#ifndef JAXFP8_CUDA_COMMON_TMA_H_
#define JAXFP8_CUDA_COMMON_TMA_H_

#include <cuda.h>

#include <cstdint>

namespace jaxfp8::cuda {

__device__ __forceinline__ uint32_t SharedAddress(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// Of one thread. ShowToTensorCores and then a barrier of the block have to follow.
__device__ __forceinline__ void InitBarrier(uint64_t* barrier, uint32_t threads) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" : : "r"(SharedAddress(barrier)), "r"(threads) : "memory");
}

__device__ __forceinline__ void Arrive(uint64_t* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" : : "r"(SharedAddress(barrier)) : "memory");
}

// Arrives, and lets the phase wait for as many bytes more.
__device__ __forceinline__ void ArriveAndExpect(uint64_t* barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :
               : "r"(SharedAddress(barrier)), "r"(bytes)
               : "memory");
}

// Until the phase of this parity has ended. At a new barrier the phase of parity 1 counts as ended.
__device__ __forceinline__ void WaitForPhase(uint64_t* barrier, uint32_t parity) {
  uint32_t has_ended = 0;
  while (has_ended == 0) {  // the instruction gives up after a while
    asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
                 : "=r"(has_ended)
                 : "r"(SharedAddress(barrier)), "r"(parity)
                 : "memory");
  }
}

// The box of a tensor from element `x` of row `y` of matrix `z` on, with zeros in place of what is outside of the tensor.
// Its bytes arrive at `barrier`. The map is a parameter of the kernel.
__device__ __forceinline__ void CopyBox(void* shared, const CUtensorMap& map, int32_t x, int32_t y, int32_t z,
                                        uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4}], [%5];"
      :
      : "r"(SharedAddress(shared)), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(SharedAddress(barrier))
      : "memory");
}

// Registers of a thread from here on, a multiple of 8. All warps of a warpgroup call it.
template <int kCount>
__device__ __forceinline__ void KeepRegisters() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" : : "n"(kCount));
}
template <int kCount>
__device__ __forceinline__ void TakeRegisters() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" : : "n"(kCount));
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_COMMON_TMA_H_
