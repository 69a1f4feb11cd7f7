// ragged_matmul: the tiles of all groups as one grid.
//
// A block takes tiles of 128 x 128 from a walk over the groups' sizes (common/ragged_plan.h). Slices of 64 elements of
// the contraction pass through three stages of shared memory, 48 KiB, copied while the tensor cores work on others.
// Sixteen warps hold 32 x 32 of the tile each. No row of `a` is read for a group it is not of; where a group begins or ends
// inside a slice of the contraction, the codes of its neighbours are replaced by zeros in both operands, because a NaN
// among them would survive a product with zero.
#include "cuda/kernels/ragged_matmul.h"

#include <cuda_runtime.h>

#include <type_traits>

#include "common/scale_product.h"
#include "cuda/common/launch.h"
#include "cuda/common/memory.h"
#include "cuda/common/ptx.h"

namespace jaxfp8::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kBlocksAtOnce = 1;  // on a multiprocessor: 128 registers a thread
constexpr int kStages = 3;
constexpr int kChunks = kRaggedSlice / kRaggedChunk;        // of a row of a slice
constexpr int kRowsAtOnce = kThreads / kChunks;             // of a slice, that the threads of a block copy
constexpr int kCopies = kRaggedTile / kRowsAtOnce;          // a thread's, of each operand
constexpr int kSliceBytes = kRaggedTile * kRaggedSlice;
constexpr int kWarpRows = 32;
constexpr int kWarpColumns = 32;
constexpr int kWarpsAcross = kRaggedTile / kWarpColumns;
constexpr int kRowBlocks = kWarpRows / 16;
constexpr int kColumnBlocks = kWarpColumns / 8;

using Accumulators = float[kRowBlocks][kColumnBlocks][4];

struct KernelParams {
  RaggedPlan plan;
  const uint8_t* a;
  const uint8_t* b;
  const float* a_scale_inv;
  const float* b_scale_inv;
  int64_t a_scale_stride;
  int64_t b_scale_stride;
  const int32_t* group_sizes;
  void* out;
  Dtype out_dtype;
  bool wide;         // rows of a and b are whole, aligned chunks
  bool wide_stores;  // two elements of out are aligned
};

// The chunk at `place` of a row, with zeros before `begin` and from `end` on. A row that is null is all zeros.
__device__ __forceinline__ void CopyChunk(uint8_t* shared, const uint8_t* row, int32_t place, int32_t begin,
                                          int32_t end, bool wide) {
  if (row == nullptr || place >= end) {
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
struct Source {
  const uint8_t* row;  // this thread's first
  int32_t count;       // of rows from there on
  int32_t length;      // of a row

  __device__ __forceinline__ Source(const uint8_t* first, int32_t rows, int32_t length)
      : row(first + int64_t{length} * (threadIdx.x / kChunks)),
        count(rows - static_cast<int32_t>(threadIdx.x / kChunks)),
        length(length) {}

  __device__ __forceinline__ void Copy(uint8_t* slice, int32_t place, int32_t begin, int32_t end, bool wide) const {
    const int chunk = threadIdx.x % kChunks;
#pragma unroll
    for (int i = 0; i < kCopies; ++i) {
      uint8_t* shared = slice + RaggedOffset(threadIdx.x / kChunks + i * kRowsAtOnce, chunk);
      const uint8_t* address = i * kRowsAtOnce < count ? row + int64_t{length} * (i * kRowsAtOnce) : nullptr;
      CopyChunk(shared, address, place + chunk * kRaggedChunk, begin, end, wide);
    }
  }
};

// Adds the product of one slice to this warp's part of the tile.
template <class A, class B, bool kPrecise>
__device__ __forceinline__ void MultiplySlice(const uint8_t* a, const uint8_t* b, Accumulators& sums) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int first_row = warp / kWarpsAcross * kWarpRows;
  const int first_column = warp % kWarpsAcross * kWarpColumns;
#pragma unroll 1  // unrolled, ptxas takes registers for both and spills
  for (int chunk = 0; chunk < kChunks; chunk += 2) {  // 32 elements
    uint32_t columns[kColumnBlocks][2];
#pragma unroll
    for (int j = 0; j < kColumnBlocks; j += 2) {  // both chunks of 8 columns, then of the next 8
      const int row = first_column + j * 8 + lane / 16 * 8 + lane % 8;
      uint32_t words[4];
      LoadMatrices(b + RaggedOffset(row, chunk + lane / 8 % 2), words);
      columns[j][0] = words[0];
      columns[j][1] = words[1];
      columns[j + 1][0] = words[2];
      columns[j + 1][1] = words[3];
    }
#pragma unroll
    for (int i = 0; i < kRowBlocks; ++i) {  // 16 rows of one chunk, then of the other
      const int row = first_row + i * 16 + lane % 16;
      uint32_t rows[4];
      LoadMatrices(a + RaggedOffset(row, chunk + lane / 16), rows);
#pragma unroll
      for (int j = 0; j < kColumnBlocks; ++j) {
        if constexpr (kPrecise) {  // the tensor cores' own sum is of 32 products, and may have fewer bits than f32
          float sum[4] = {};
          MultiplyFp8<A, B>(sum, rows, columns[j]);
#pragma unroll
          for (int c = 0; c < 4; ++c) sums[i][j][c] += sum[c];
        } else {
          MultiplyFp8<A, B>(sums[i][j], rows, columns[j]);
        }
      }
    }
  }
}

template <class Out>
__device__ __forceinline__ Bytes<2 * sizeof(Out)> Narrow(float first, float second) {
  if constexpr (sizeof(Out) == 4) {
    return {{FloatToBits(first), FloatToBits(second)}};
  } else if constexpr (std::is_same_v<Out, BF16>) {
    return {{FloatsToBF16x2(first, second)}};
  } else {
    return {{FloatsToF16x2(first, second)}};
  }
}

template <class Out>
__device__ __forceinline__ void StoreTile(const KernelParams& params, const RaggedRange& range,
                                          const ScaleFactors& scales, const Accumulators& sums) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const RaggedPlan& plan = params.plan;
  const int64_t matrix = plan.contraction ? int64_t{range.member} * plan.groups + range.group : range.member;
  const int32_t first_row = range.row + warp / kWarpsAcross * kWarpRows + lane / 4;
  const int32_t first_column = range.column + warp % kWarpsAcross * kWarpColumns + lane % 4 * 2;
  Out* out = static_cast<Out*>(params.out) + (matrix * plan.rows + first_row) * plan.columns + first_column;
#pragma unroll
  for (int i = 0; i < kRowBlocks; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = i * 16 + half * 8;
      if (first_row + row >= range.row_end) continue;
      Out* address = out + int64_t{row} * plan.columns;
#pragma unroll
      for (int j = 0; j < kColumnBlocks; ++j) {
        const int32_t left = plan.columns - first_column - j * 8;
        const Bytes<2 * sizeof(Out)> pair =
            Narrow<Out>(scales.Scale(sums[i][j][2 * half]), scales.Scale(sums[i][j][2 * half + 1]));
        if (left >= 2 && params.wide_stores) {
          Store(address + j * 8, pair);
        } else {
          constexpr int kWidth = sizeof(Out);
          const uint32_t second = kWidth == 4 ? pair.words[kWidth / 4] : pair.words[0] >> 16;
          if (left >= 1) Store(address + j * 8, Bytes<kWidth>{{pair.words[0]}});
          if (left >= 2) Store(address + j * 8 + 1, Bytes<kWidth>{{second}});
        }
      }
    }
  }
}

template <class A, class B, bool kPrecise>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce) RaggedMatmulKernel(KernelParams params) {
  alignas(128) __shared__ uint8_t stages[kStages][2][kSliceBytes];
  const RaggedPlan& plan = params.plan;
  RaggedWalk walk(plan, params.group_sizes);
  RaggedRange range;
  for (int64_t index = blockIdx.x; walk.Find(index, &range); index += gridDim.x) {
    const int64_t b_matrix = plan.contraction ? range.member : int64_t{range.member} * plan.groups + range.group;
    const Source a(params.a + (int64_t{range.member} * plan.rows + range.row) * plan.length,
                   range.row_end - range.row, plan.length);
    const Source b(params.b + (b_matrix * plan.columns + range.column) * plan.length, plan.columns - range.column,
                   plan.length);
    // Chunks lie where rows of a and b are aligned, also where the group begins elsewhere.
    const int32_t first = range.begin / kRaggedChunk * kRaggedChunk;
    const int32_t slices = range.end > range.begin ? (range.end - first + kRaggedSlice - 1) / kRaggedSlice : 0;
    const auto copy = [&](int32_t slice) {
      if (slice < slices) {
        const int32_t place = first + slice * kRaggedSlice;
        a.Copy(stages[slice % kStages][0], place, range.begin, range.end, params.wide);
        b.Copy(stages[slice % kStages][1], place, range.begin, range.end, params.wide);
      }
      CommitCopies();  // also an empty group of copies, so that their count is that of the slices
    };

    Accumulators sums = {};
#pragma unroll
    for (int slice = 0; slice < kStages - 1; ++slice) copy(slice);
#pragma unroll 1
    for (int32_t slice = 0; slice < slices; ++slice) {
      WaitForCopies<kStages - 2>();
      __syncthreads();  // this slice has arrived for all threads, and all are done with the one before it
      copy(slice + kStages - 1);
      MultiplySlice<A, B, kPrecise>(stages[slice % kStages][0], stages[slice % kStages][1], sums);
    }
    WaitForCopies<0>();
    __syncthreads();  // the next tile begins with the first stage

    const ScaleFactors scales = MultiplyScales(params.a_scale_inv[range.member * params.a_scale_stride],
                                               params.b_scale_inv[range.member * params.b_scale_stride]);
    switch (params.out_dtype) {
      case Dtype::kBF16: StoreTile<BF16>(params, range, scales, sums); break;
      case Dtype::kF16: StoreTile<F16>(params, range, scales, sums); break;
      default: StoreTile<F32>(params, range, scales, sums); break;
    }
  }
}

template <class A, class B, bool kPrecise>
cudaError_t Run(const RaggedMatmulParams& params, cudaStream_t stream) {
  int multiprocessors = 0;
  JAXFP8_RETURN_IF_CUDA_ERROR(Multiprocessors(&multiprocessors));
  const RaggedPlan& plan = params.plan;
  const KernelParams kernel_params = {
      plan,
      static_cast<const uint8_t*>(params.a),
      static_cast<const uint8_t*>(params.b),
      params.a_scale_inv,
      params.b_scale_inv,
      params.a_scale_stride,
      params.b_scale_stride,
      params.group_sizes,
      params.out,
      params.out_dtype,
      plan.length % kRaggedChunk == 0 && IsAligned(params.a, kRaggedChunk) && IsAligned(params.b, kRaggedChunk),
      plan.columns % 2 == 0 && IsAligned(params.out, 2 * ByteWidth(params.out_dtype)),
  };
  const int64_t max_blocks = int64_t{multiprocessors} * kBlocksAtOnce;
  const int64_t tiles = plan.MaxTiles();
  return Launch(RaggedMatmulKernel<A, B, kPrecise>, tiles < max_blocks ? tiles : max_blocks, kThreads, stream,
                kernel_params);
}

}  // namespace

cudaError_t LaunchRaggedMatmul(const RaggedMatmulParams& params, cudaStream_t stream) {
  if (params.plan.MaxTiles() == 0) return cudaSuccess;
  cudaError_t status = cudaErrorInvalidValue;
  DispatchFp8(params.a_dtype, [&](auto a) {
    DispatchFp8(params.b_dtype, [&](auto b) {
      using A = typename decltype(a)::type;
      using B = typename decltype(b)::type;
      status = params.precise ? Run<A, B, true>(params, stream) : Run<A, B, false>(params, stream);
    });
  });
  return status;
}

}  // namespace jaxfp8::cuda
