// The amax of a group: over a thread's elements, then lanes, warps and blocks.
//
// A maximum does not depend on the order of its operands: the same input gives the same bytes on every run.
#ifndef JAXFP8_CUDA_COMMON_AMAX_H_
#define JAXFP8_CUDA_COMMON_AMAX_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/convert.h"
#include "cuda/common/memory.h"
#include "cuda/common/stream_plan.h"

namespace jaxfp8::cuda {

// NaN counts as +inf. Clamping to it once per atomic gives what clamping every element gives. Without an amax, nothing.
__device__ __forceinline__ void RaiseAmax(float* amax, uint32_t largest) {
  if (amax != nullptr) atomicMax(reinterpret_cast<unsigned int*>(amax), min(largest, kInfBits));
}

// The amax of a thread's elements, a word of them at a time: one instruction for two 16-bit floats.
template <class T>
class AmaxAccumulator {
 public:
  __device__ __forceinline__ void Reset() { largest_ = 0; }
  template <int kBytes>
  __device__ __forceinline__ void Add(const Bytes<kBytes>& elements) {
#pragma unroll
    for (const uint32_t word : elements.words) largest_ = LargerMagnitudes<T>(largest_, word);
  }
  __device__ __forceinline__ void Add(float x) { Add(Bytes<4>{{FloatToBits(x)}}); }
  // As the bits of an f32 without its sign, which order as the numbers do; NaN is above infinity.
  __device__ __forceinline__ uint32_t Bits() const {
    uint32_t largest = FloatToBits(Widen<T>(&largest_, 0)) & kAbsMask;
    if (sizeof(T) == 2) largest = max(largest, FloatToBits(Widen<T>(&largest_, 1)) & kAbsMask);
    return largest;
  }
  __device__ __forceinline__ uint32_t OverWarp() const { return __reduce_max_sync(0xffffffffu, Bits()); }

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
template <class T>
__device__ __forceinline__ void FinishAmax(const AmaxAccumulator<T>& accumulator, const StreamPlan& plan, float* amax) {
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
