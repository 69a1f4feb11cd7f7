// How the elementwise kernels share out `[groups, size]` among warps: index arithmetic only, for host and device.
//
// The unit is a tile: what one warp loads before it computes, kLoads vectors a lane. `workers` warps stride over the
// tiles of one group, and `slots` groups are in progress at a time. So one huge group and a million tiny ones both fill
// the device, every warp divides once, and a warp flushes the amax of a group once.
#ifndef JAXFP8_CUDA_COMMON_STREAM_PLAN_H_
#define JAXFP8_CUDA_COMMON_STREAM_PLAN_H_

#include <cstdint>

#include "common/fp8.h"

namespace jaxfp8::cuda {

constexpr int kWarpSize = 32;
constexpr int kWarpsPerBlock = 8;
constexpr int kBlockSize = kWarpSize * kWarpsPerBlock;
// Four 16-byte loads a lane in flight: 64 KiB a multiprocessor at 1024 resident threads, twice what hides the latency
// of HBM3e.
constexpr int kLoads = 4;
constexpr int64_t kTileVectors = kWarpSize * kLoads;
// Two to four times the resident blocks: enough for the hardware to balance, few enough for one atomic each.
constexpr int kBlocksPerMultiprocessor = 16;

struct StreamPlan {
  int64_t groups;
  int64_t size;     // elements of a group
  int64_t vectors;  // whole vectors of a group; the other size % vector elements are its tail
  int64_t tiles;    // of a group, at least 1
  int32_t workers;  // warps on one group; a multiple of kWarpsPerBlock, or fewer than that
  int32_t slots;    // groups in progress

  constexpr int64_t Blocks() const { return (int64_t{workers} * slots + kWarpsPerBlock - 1) / kWarpsPerBlock; }
  // Then the warps of a block always have the same group, and the block can reduce before its atomic.
  JAXFP8_HD constexpr bool BlockHasOneGroup() const { return workers % kWarpsPerBlock == 0; }
};

// `groups` and `size` are at least 1.
constexpr StreamPlan MakeStreamPlan(int64_t groups, int64_t size, int vector, int multiprocessors) {
  const int64_t max_warps = int64_t{multiprocessors} * kBlocksPerMultiprocessor * kWarpsPerBlock;
  const int64_t vectors = size / vector;
  const int64_t tiles = vectors == 0 ? 1 : (vectors - 1) / kTileVectors + 1;
  int64_t workers = tiles;
  if (workers > kWarpsPerBlock) workers += (kWarpsPerBlock - workers % kWarpsPerBlock) % kWarpsPerBlock;
  if (workers > max_warps) workers = max_warps;
  const int64_t room = max_warps / workers;
  const int64_t slots = groups < room ? groups : room;
  return {groups, size, vectors, tiles, static_cast<int32_t>(workers), static_cast<int32_t>(slots)};
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_COMMON_STREAM_PLAN_H_
