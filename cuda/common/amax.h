// The amax of a group: a maximum of float bits, over lanes, warps and then blocks.
//
// Integer maxima make the order of the reduction irrelevant: the same input gives the same bytes on every run.
#ifndef JAXFP8_CUDA_COMMON_AMAX_H_
#define JAXFP8_CUDA_COMMON_AMAX_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "common/fp8.h"
#include "cuda/common/stream_plan.h"

namespace jaxfp8::cuda {

// NaN counts as +inf. Clamping to it once per atomic gives what clamping every element gives. Without an amax, nothing.
__device__ __forceinline__ void RaiseAmax(float* amax, uint32_t largest) {
  if (amax != nullptr) atomicMax(reinterpret_cast<unsigned int*>(amax), min(largest, kInfBits));
}

class AmaxAccumulator {
 public:
  __device__ __forceinline__ void Reset() { largest_ = 0; }
  __device__ __forceinline__ void Add(float x) { largest_ = max(largest_, FloatToBits(x) & kAbsMask); }
  __device__ __forceinline__ uint32_t OverWarp() const { return __reduce_max_sync(0xffffffffu, largest_); }

 private:
  uint32_t largest_ = 0;
};

// One maximum a warp, in shared memory; then warp 0 has the block's. There must be a __syncthreads() between the two,
// and another before the next Put.
template <int kWarps>
class BlockAmax {
 public:
  __device__ __forceinline__ void Put(uint32_t over_warp) {
    if (threadIdx.x % kWarpSize == 0) warps_[threadIdx.x / kWarpSize] = over_warp;
  }
  // In the lanes of warp 0; 0 in the others.
  __device__ __forceinline__ uint32_t InFirstWarp() const {
    if (threadIdx.x >= kWarpSize) return 0;
    return __reduce_max_sync(0xffffffffu, threadIdx.x < kWarps ? warps_[threadIdx.x] : 0);
  }
  __device__ __forceinline__ void Raise(float* amax) const {
    const uint32_t largest = InFirstWarp();
    if (threadIdx.x == 0) RaiseAmax(amax, largest);
  }

 private:
  uint32_t warps_[kWarps];
};

// The end of a group in a streaming kernel.
__device__ __forceinline__ void FinishAmax(const AmaxAccumulator& accumulator, const StreamPlan& plan, float* amax) {
  const uint32_t over_warp = accumulator.OverWarp();
  if (plan.BlockHasOneGroup()) {
    __shared__ BlockAmax<kWarpsPerBlock> block;
    block.Put(over_warp);
    __syncthreads();
    block.Raise(amax);
    __syncthreads();
  } else if (threadIdx.x % kWarpSize == 0) {
    RaiseAmax(amax, over_warp);
  }
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_COMMON_AMAX_H_
