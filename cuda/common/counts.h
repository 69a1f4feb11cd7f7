// The counts of a group: sums of integers, over lanes, warps and then blocks, in any order with the same result.
//
// Kernels take kCounts as a template parameter; without it none of this is there.
#ifndef JAXFP8_CUDA_COMMON_COUNTS_H_
#define JAXFP8_CUDA_COMMON_COUNTS_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "common/counts.h"
#include "cuda/common/stream_plan.h"

namespace jaxfp8::cuda {

// Counts begin at zero: one more node in a graph, and none without counts.
inline cudaError_t StartCounts(Counts* counts, int64_t groups, cudaStream_t stream) {
  return counts == nullptr ? cudaSuccess : cudaMemsetAsync(counts, 0, groups * sizeof(Counts), stream);
}

// 32 bits: a block would have to see 2^32 elements of one group, and a GPU has many blocks.
template <class Format>
class CountsAccumulator {
 public:
  __device__ __forceinline__ void Reset() { saturated_ = flushed_ = 0; }
  // y: x times the scale; unlike what becomes a code, infinite where x is.
  __device__ __forceinline__ void Add(float x, float y) {
    saturated_ += Saturates<Format>(y);
    flushed_ += FlushesToZero<Format>(x, y);
  }
  __device__ __forceinline__ uint2 OverWarp() const {
    return make_uint2(__reduce_add_sync(0xffffffffu, saturated_), __reduce_add_sync(0xffffffffu, flushed_));
  }

 private:
  uint32_t saturated_ = 0;
  uint32_t flushed_ = 0;
};

__device__ __forceinline__ void AddCounts(Counts* counts, uint2 more) {
  if (more.x != 0) atomicAdd(reinterpret_cast<unsigned long long*>(&counts->saturated), more.x);
  if (more.y != 0) atomicAdd(reinterpret_cast<unsigned long long*>(&counts->flushed), more.y);
}

// Two sums a warp, in shared memory; then warp 0 has the block's. Barriers as for BlockAmax (amax.h).
template <int kWarps>
class BlockCounts {
 public:
  __device__ __forceinline__ void Put(uint2 over_warp) {
    if (threadIdx.x % kWarpSize == 0) warps_[threadIdx.x / kWarpSize] = over_warp;
  }
  __device__ __forceinline__ void AddTo(Counts* counts) const {
    if (threadIdx.x >= kWarpSize) return;
    const uint2 mine = threadIdx.x < kWarps ? warps_[threadIdx.x] : make_uint2(0, 0);
    const uint2 sums = make_uint2(__reduce_add_sync(0xffffffffu, mine.x), __reduce_add_sync(0xffffffffu, mine.y));
    if (threadIdx.x == 0) AddCounts(counts, sums);
  }

 private:
  uint2 warps_[kWarps];
};

// The end of a group in a streaming kernel.
template <class Format>
__device__ __forceinline__ void FinishCounts(const CountsAccumulator<Format>& accumulator, const StreamPlan& plan,
                                             Counts* counts) {
  const uint2 over_warp = accumulator.OverWarp();
  if (plan.BlockHasOneGroup()) {
    __shared__ BlockCounts<kWarpsPerBlock> block;
    block.Put(over_warp);
    __syncthreads();
    block.AddTo(counts);
    __syncthreads();
  } else if (threadIdx.x % kWarpSize == 0) {
    AddCounts(counts, over_warp);
  }
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_COMMON_COUNTS_H_
