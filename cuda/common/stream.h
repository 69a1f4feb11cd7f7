// The loop of the elementwise kernels: walks `[groups, size]` by a StreamPlan and hands out vectors of elements.
#ifndef JAXFP8_CUDA_COMMON_STREAM_H_
#define JAXFP8_CUDA_COMMON_STREAM_H_

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/common/memory.h"
#include "cuda/common/stream_plan.h"

namespace jaxfp8::cuda {

// Calls, for every group this warp has a share of,
//
//   body.Begin(group)
//   body.template Visit<N>(offset, bytes)   N elements, kVector or 1 in the tail, the first at `offset` of the input
//   body.End(group, plan)                   by all lanes; by all warps of the block if plan.BlockHasOneGroup()
//
// With kVector > 1, `input` and every group in it must be aligned to kVector elements.
template <int kVector, class In, class Body>
__device__ __forceinline__ void Stream(const StreamPlan& plan, const In* __restrict__ input, Body body) {
  constexpr int kBytes = kVector * static_cast<int>(sizeof(In));
  const int lane = threadIdx.x % kWarpSize;
  const int warp = blockIdx.x * kWarpsPerBlock + threadIdx.x / kWarpSize;
  const int slot = warp / plan.workers;
  const int worker = warp - slot * plan.workers;
  if (slot >= plan.slots) return;

  for (int64_t group = slot; group < plan.groups; group += plan.slots) {
    const int64_t start = group * plan.size;
    body.Begin(group);
    for (int64_t tile = worker; tile < plan.tiles; tile += plan.workers) {
      const int64_t first = tile * kTileVectors + lane;
      Bytes<kBytes> loaded[kLoads];
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int64_t vector = first + i * kWarpSize;
        if (vector < plan.vectors) loaded[i] = Load<kBytes>(input + start + vector * kVector);
      }
#pragma unroll
      for (int i = 0; i < kLoads; ++i) {
        const int64_t vector = first + i * kWarpSize;
        if (vector < plan.vectors) body.template Visit<kVector>(start + vector * kVector, loaded[i]);
      }
      if (kVector > 1 && tile == plan.tiles - 1) {
        const int64_t element = plan.vectors * kVector + lane;
        if (element < plan.size) {
          body.template Visit<1>(start + element, Load<static_cast<int>(sizeof(In))>(input + start + element));
        }
      }
    }
    body.End(group, plan);
  }
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_COMMON_STREAM_H_
