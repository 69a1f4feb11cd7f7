// What every op is given that quantizes a matrix tile by tile.
#ifndef JAXFP8_CUDA_KERNELS_TILE_PARAMS_H_
#define JAXFP8_CUDA_KERNELS_TILE_PARAMS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/dispatch.h"

namespace jaxfp8::cuda {

struct TileParams {
  Dtype dtype;               // of x: bf16, f16 or f32
  Dtype format;              // of data and data_t: e4m3 or e5m2
  const void* x;             // [groups, m, n], unless the op says otherwise
  const float* scale;        // [1] or [groups]
  int64_t scale_stride;      // 0 or 1
  void* data;                // [groups, m, n]
  void* data_t;              // [groups, n, m], or null: not wanted
  const float* amax_so_far;  // [groups], not negative; or null: 0
  float* amax;               // [groups]: raised, from what it is so far; may be the same buffer. Null: not wanted
  int64_t groups;
  int64_t m;
  int64_t n;
};

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_TILE_PARAMS_H_
