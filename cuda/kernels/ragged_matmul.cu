// ragged_matmul: the tiles of all groups as one grid.
//
// A block takes tiles from a walk over the groups' sizes (common/ragged_plan.h). Slices of the contraction pass through stages
// of shared memory, copied while the tensor cores work on others (ragged_tile.h). No row of `a` is read for a group it is not
// of; where a group begins or ends inside a slice of the contraction, the codes of its neighbours are replaced by zeros in
// both operands, because a NaN among them would survive a product with zero. Scales of blocks pass through the stages beside
// the codes: a slice is one block of the contraction, counted from its first element and not from the group's.
#include "cuda/kernels/ragged_matmul.h"

#include <cuda_runtime.h>

#include "common/scale_product.h"
#include "cuda/common/launch.h"
#include "cuda/common/memory.h"
#include "cuda/common/ptx.h"
#include "cuda/kernels/ragged_store.h"
#include "cuda/kernels/ragged_tile.h"

namespace jaxfp8::cuda {
namespace {

constexpr int kBlocksAtOnce = 1;  // on a multiprocessor

struct KernelParams {
  RaggedPlan plan;
  const uint8_t* a;
  const uint8_t* b;
  const float* a_scale_inv;
  const float* b_scale_inv;
  int64_t a_scale_stride;
  int64_t b_scale_stride;
  const int32_t* group_sizes;
  RaggedOutput output;
  bool wide;  // rows of a and b are whole, aligned chunks
  // From a row's or a column's scale of one slice to that of the next, of a tile with scales.
  int32_t a_scale_step;
  int32_t b_scale_step;
};

// The chunk at `place` of a row, with zeros before `begin` and from `end` on. A row that is null is all zeros.
__device__ __forceinline__ void CopyChunk(uint8_t* shared, const uint8_t* row, int32_t place, int32_t begin,
                                          int32_t end, bool wide) {
  if (row == nullptr || place >= end || place + kRaggedChunk <= begin) {
    StoreShared16(shared, 0, 0, 0, 0);
  } else if (wide && place >= begin) {
    CopyAsync16(shared, row + place, min(end - place, kRaggedChunk));
  } else {
#pragma unroll 1
    for (int i = 0; i < kRaggedChunk; ++i) {
      const bool inside = place + i >= begin && place + i < end;
      shared[i] = inside ? static_cast<uint8_t>(Load<1>(row + place + i).words[0]) : 0;
    }
  }
}

// What a thread copies of one operand: one chunk of each of kCopies rows of every slice.
template <class Tile, int kRows>
struct Source {
  static constexpr int kChunks = Tile::kSlice / kRaggedChunk;   // of a row of a slice
  static constexpr int kRowsAtOnce = Tile::kThreads / kChunks;  // of a slice, that the threads of a block copy
  static constexpr int kCopies = kRows / kRowsAtOnce;

  const uint8_t* row;  // this thread's first
  int32_t count;       // of rows from there on
  int32_t length;      // of a row

  __device__ __forceinline__ Source(const uint8_t* first, int32_t rows, int32_t length)
      : row(first + int64_t{length} * (threadIdx.x / kChunks)),
        count(rows - static_cast<int32_t>(threadIdx.x / kChunks)),
        length(length) {}

  __device__ __forceinline__ void Copy(uint8_t* slice, int32_t place, int32_t begin, int32_t end, bool wide) const {
    const int first_row = threadIdx.x / kChunks, chunk = threadIdx.x % kChunks;
    // Where the whole slice is of this group. A thread that copies one chunk gains nothing by that.
    if (kCopies > 1 && wide && place >= begin && place + Tile::kSlice <= end) {
      const uint8_t* source = row + place + chunk * kRaggedChunk;
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int bytes = i * kRowsAtOnce < count ? kRaggedChunk : 0;
        CopyAsync16(slice + Tile::Offset(first_row + i * kRowsAtOnce, chunk), source, bytes);
        source += int64_t{length} * kRowsAtOnce;
      }
    } else {
#pragma unroll 1  // seldom
      for (int i = 0; i < kCopies; ++i) {
        const uint8_t* source = i * kRowsAtOnce < count ? row + int64_t{length} * (i * kRowsAtOnce) : nullptr;
        CopyChunk(slice + Tile::Offset(first_row + i * kRowsAtOnce, chunk), source, place + chunk * kRaggedChunk, begin,
                  end, wide);
      }
    }
  }
};

// What a device has no instructions for, and what it never runs, is not compiled for it.
#if !defined(__CUDA_ARCH__)
constexpr bool kHasWarps = true, kHasWarpgroups = true;
#elif defined(__CUDA_ARCH_FEAT_SM90_ALL)
constexpr bool kHasWarps = false, kHasWarpgroups = true;
#else
constexpr bool kHasWarps = true, kHasWarpgroups = false;
#endif

// The scales of a tile's slices, of which each thread copies those of one row and of one column. What lies beyond the matrix
// has those of its last row or column, and is not stored.
template <class Tile, bool kHasScales>
struct ScaleSource {
  static_assert(Tile::kSlice == kRaggedBlock && Tile::kRows <= Tile::kThreads && Tile::kColumns <= Tile::kThreads);
  const float* of_row;  // of the next slice
  const float* of_column;
  int32_t row_step;
  int32_t column_step;

  __device__ __forceinline__ ScaleSource(const KernelParams& params, const RaggedRange& range, int64_t matrix_of_b)
      : row_step(params.a_scale_step), column_step(params.b_scale_step) {
    const RaggedPlan& plan = params.plan;
    const int32_t blocks = RaggedBlocks(plan.length), block = range.begin / kRaggedBlock;
    const int32_t row = min(range.row + static_cast<int32_t>(threadIdx.x), plan.rows - 1);
    const int32_t column = min(range.column + static_cast<int32_t>(threadIdx.x), plan.columns - 1);
    of_row = params.a_scale_inv + (int64_t{range.member} * blocks + block) * plan.rows + row;
    const int64_t of_b = plan.contraction
                             ? (matrix_of_b * blocks + block) * plan.columns + column
                             : (matrix_of_b * RaggedBlocks(plan.columns) + column / kRaggedBlock) * blocks;
    of_column = params.b_scale_inv + of_b;
  }

  __device__ __forceinline__ void CopyNext(float* scales) {
    if (threadIdx.x < Tile::kRows) CopyAsync4(scales + threadIdx.x, of_row);
    if (threadIdx.x < Tile::kColumns) CopyAsync4(scales + Tile::kRows + threadIdx.x, of_column);
    of_row += row_step;
    of_column += column_step;
  }
};

template <class Tile>
struct ScaleSource<Tile, false> {
  __device__ __forceinline__ ScaleSource(const KernelParams&, const RaggedRange&, int64_t) {}
  __device__ __forceinline__ void CopyNext(float*) {}
};

// What a tile is the product of, and how it comes to the stages.
template <class Tile>
struct Input {
  static constexpr int kSliceBytes = (Tile::kRows + Tile::kColumns) * Tile::kSlice;
  static constexpr int kScaleBytes = Tile::kHasScales ? (Tile::kRows + Tile::kColumns) * 4 : 0;
  static constexpr int kStageBytes = kSliceBytes + (kScaleBytes + 1023) / 1024 * 1024;  // codes, then scales
  // Chunks lie where rows of a and b are aligned, also where the group begins elsewhere; slices with scales are blocks.
  static constexpr int kAlignment = Tile::kHasScales ? kRaggedBlock : kRaggedChunk;

  Source<Tile, Tile::kRows> a;
  Source<Tile, Tile::kColumns> b;
  ScaleSource<Tile, Tile::kHasScales> scales;
  int32_t first, begin, end;
  int32_t slices;
  bool wide;
  uint8_t* stages;

  __device__ __forceinline__ Input(const KernelParams& params, const RaggedRange& range, uint8_t* stages)
      : a(params.a + (int64_t{range.member} * params.plan.rows + range.row) * params.plan.length,
          range.row_end - range.row, params.plan.length),
        b(params.b + (MatrixOfB(params.plan, range) * params.plan.columns + range.column) * params.plan.length,
          params.plan.columns - range.column, params.plan.length),
        scales(params, range, MatrixOfB(params.plan, range)),
        first(range.begin / kAlignment * kAlignment),
        begin(range.begin),
        end(range.end),
        slices(range.end > range.begin ? (range.end - first + Tile::kSlice - 1) / Tile::kSlice : 0),
        wide(params.wide),
        stages(stages) {
#pragma unroll
    for (int slice = 0; slice < Tile::kAhead; ++slice) Copy(slice);
  }

  __device__ __forceinline__ static int64_t MatrixOfB(const RaggedPlan& plan, const RaggedRange& range) {
    return plan.contraction ? range.member : int64_t{range.member} * plan.groups + range.group;
  }
  __device__ __forceinline__ uint8_t* OfA(int32_t slice) const { return stages + slice % Tile::kStages * kStageBytes; }
  __device__ __forceinline__ uint8_t* OfB(int32_t slice) const { return OfA(slice) + Tile::kRows * Tile::kSlice; }
  __device__ __forceinline__ float* ScalesOf(int32_t slice) const {
    return reinterpret_cast<float*>(OfA(slice) + kSliceBytes);
  }

  __device__ __forceinline__ void Copy(int32_t slice) {
    if (slice < slices) {
      const int32_t place = first + slice * Tile::kSlice;
      a.Copy(OfA(slice), place, begin, end, wide);
      b.Copy(OfB(slice), place, begin, end, wide);
      scales.CopyNext(ScalesOf(slice));
    }
    CommitCopies();  // also an empty group of copies, so that their count is that of the slices
  }
};

template <class Tile>
__device__ __forceinline__ ScaleFactors ScalesOf(const KernelParams& params, int32_t member) {
  if constexpr (Tile::kHasScales) return {1, 1};
  return MultiplyScales(params.a_scale_inv[member * params.a_scale_stride],
                        params.b_scale_inv[member * params.b_scale_stride]);
}

template <class Tile>
__device__ __forceinline__ void MultiplyTiles(const KernelParams& params) {
  uint8_t* const stages = DynamicShared<Tile::kStages * Input<Tile>::kStageBytes>();
  RaggedWalk walk(params.plan, params.group_sizes);
  RaggedRange range;
  int64_t index = blockIdx.x;
  if (!walk.Find(index, &range)) return;
  Input<Tile> input(params, range, stages);
  for (bool more = true; more;) {
    Tile tile;
#pragma unroll 1
    for (int32_t slice = 0; slice < input.slices; ++slice) {
      WaitForCopies<Tile::kAhead - 1>();
      tile.Show();
      __syncthreads();  // this slice has arrived for all threads, and all are done with the one that is copied over
      tile.Start(input.OfA(slice), input.OfB(slice));
      input.Copy(slice + Tile::kAhead);
      tile.Finish(input.OfA(slice), input.OfB(slice), input.ScalesOf(slice));
    }
    WaitForCopies<0>();
    tile.End();
    __syncthreads();  // the next tile begins with the first stage

    // The next tile is on its way while this one is stored.
    const RaggedRange multiplied = range;
    index += gridDim.x;
    more = walk.Find(index, &range);
    if (more) input = Input<Tile>(params, range, stages);
    StoreTile(params.plan, params.output, multiplied, ScalesOf<Tile>(params, multiplied.member), tile);
  }
}

template <class Tile>
__global__ void __launch_bounds__(Tile::kThreads, kBlocksAtOnce) RaggedMatmulKernel(KernelParams params) {
  if constexpr (Tile::kUsesWarpgroups ? kHasWarpgroups : kHasWarps) MultiplyTiles<Tile>(params);
}

template <class Tile>
cudaError_t Run(const RaggedMatmulParams& params, int multiprocessors, cudaStream_t stream) {
  RaggedPlan plan = params.plan;
  plan.column_tile = Tile::kColumns;
  const KernelParams kernel_params = {
      plan,
      static_cast<const uint8_t*>(params.a),
      static_cast<const uint8_t*>(params.b),
      params.a_scale_inv,
      params.b_scale_inv,
      params.a_scale_stride,
      params.b_scale_stride,
      params.group_sizes,
      OutputOf(params),
      HasWholeChunks(params),
      plan.rows,
      plan.contraction ? plan.columns : 1,
  };
  const int64_t max_blocks = int64_t{multiprocessors} * kBlocksAtOnce;
  const int64_t tiles = plan.MaxTiles();
  return LaunchWithShared(RaggedMatmulKernel<Tile>, tiles < max_blocks ? tiles : max_blocks, Tile::kThreads,
                          Tile::kStages * Input<Tile>::kStageBytes, stream, kernel_params);
}

template <class A, class B, bool kPrecise>
cudaError_t RunOnDevice(const RaggedMatmulParams& params, cudaStream_t stream) {
  int multiprocessors = 0, capability = 0;
  JAXFP8_RETURN_IF_CUDA_ERROR(Multiprocessors(&multiprocessors));
  JAXFP8_RETURN_IF_CUDA_ERROR(DeviceAttribute(cudaDevAttrComputeCapabilityMajor, &capability));
  if constexpr (kPrecise) {
    if (params.blocks) {
      if (capability != 9) return cudaErrorNotSupported;
      return Run<WarpgroupTile<A, B, true, true>>(params, multiprocessors, stream);
    }
  }
  return capability == 9 ? Run<WarpgroupTile<A, B, kPrecise>>(params, multiprocessors, stream)
                         : Run<WarpTile<A, B, kPrecise>>(params, multiprocessors, stream);
}

}  // namespace

cudaError_t LaunchRaggedMatmul(const RaggedMatmulParams& params, cudaStream_t stream) {
  if (params.plan.MaxTiles() == 0) return cudaSuccess;
  cudaError_t status = params.tma ? LaunchRaggedTma(params, stream) : cudaErrorNotSupported;
  if (status != cudaErrorNotSupported) return status;
  DispatchFp8(params.a_dtype, [&](auto a) {
    DispatchFp8(params.b_dtype, [&](auto b) {
      using A = typename decltype(a)::type;
      using B = typename decltype(b)::type;
      const bool precise = params.precise || params.blocks;
      status = precise ? RunOnDevice<A, B, true>(params, stream) : RunOnDevice<A, B, false>(params, stream);
    });
  });
  return status;
}

}  // namespace jaxfp8::cuda
