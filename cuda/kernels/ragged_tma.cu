// ragged_matmul on Hopper, its slices copied by the copy engine (cuda/common/tma.h).
//
// Of a block's three warpgroups the last one copies and the others multiply. Slices of all of the block's tiles pass through
// one ring of stages, each with two barriers: `full` ends a phase when the slice's bytes have arrived, `empty` when every
// multiplying warp is done with it. Little else orders the warpgroups, so one stores its part of a tile while the other
// multiplies, and the copies of the next tile go on.
//
// A box may reach over the end of its group to rows of the next one: these are multiplied, and not stored. Where the groups cut
// the contraction, the multiplying warps write zeros over the codes of other groups in the first and the last slice.
#include <cuda_runtime.h>

#include <type_traits>

#include "common/scale_product.h"
#include "cuda/common/launch.h"
#include "cuda/common/tma.h"
#include "cuda/kernels/ragged_matmul.h"
#include "cuda/kernels/ragged_store.h"
#include "cuda/kernels/ragged_tile.h"

namespace jaxfp8::cuda {
namespace {

// Of 504 for three threads, one of each warpgroup.
constexpr int kCopyRegisters = 40, kProductRegisters = 232;
static_assert(kCopyRegisters + 2 * kProductRegisters <= 3 * 168, "what ptxas gives to 384 threads");

struct KernelParams {
  CUtensorMap a;  // [members, rows, length]
  CUtensorMap b;  // [members * groups, columns, length]; [members, columns, length] where the groups cut length
  RaggedMatmulParams call;
  RaggedOutput output;
};

// The stages, in turn. Each warpgroup walks over them by itself.
template <class Tile>
class Ring {
 public:
  static constexpr int kBytesOfA = Tile::kRows * Tile::kSlice, kStageBytes = kBytesOfA + Tile::kColumns * Tile::kSlice;
  static constexpr int kBytes = Tile::kStages * kStageBytes + (2 * Tile::kStages + 1) * 8;
  static_assert(kBytes <= 227 * 1024, "the shared memory of a block");

  __device__ __forceinline__ explicit Ring(uint8_t* shared)
      : stages_(shared), barriers_(reinterpret_cast<uint64_t*>(shared + Tile::kStages * kStageBytes)) {}

  // By one thread, before any other member.
  __device__ __forceinline__ void Init() const {
    for (int stage = 0; stage < Tile::kStages; ++stage) {
      InitBarrier(barriers_ + 2 * stage, 1);
      InitBarrier(barriers_ + 2 * stage + 1, Tile::kThreads / 32);
    }
    InitBarrier(cleared(), Tile::kThreads);
  }

  __device__ __forceinline__ uint8_t* a() const { return stages_ + stage_ * kStageBytes; }
  __device__ __forceinline__ uint8_t* b() const { return a() + kBytesOfA; }
  __device__ __forceinline__ uint64_t* full() const { return barriers_ + 2 * stage_; }
  __device__ __forceinline__ uint64_t* empty() const { return full() + 1; }
  __device__ __forceinline__ uint64_t* cleared() const { return barriers_ + 2 * Tile::kStages; }
  __device__ __forceinline__ uint32_t parity() const { return parity_; }

  // After the products that read the stage have ended for this warp.
  static __device__ __forceinline__ void Release(uint64_t* empty) {
    if (threadIdx.x % 32 == 0) Arrive(empty);
  }
  __device__ __forceinline__ void Next() {
    if (++stage_ < Tile::kStages) return;
    stage_ = 0;
    parity_ ^= 1;
  }

 private:
  uint8_t* stages_;
  uint64_t* barriers_;
  uint32_t stage_ = 0;
  uint32_t parity_ = 0;
};

// Those of a tile's contraction: from the same elements on as the slices of ragged_matmul.cu, so that sums are the same.
template <class Tile>
struct Slices {
  int32_t first;  // element
  int32_t count;

  __device__ __forceinline__ explicit Slices(const RaggedRange& range)
      : first(range.begin / kRaggedChunk * kRaggedChunk),
        count(range.end > range.begin ? (range.end - first + Tile::kSlice - 1) / Tile::kSlice : 0) {}
  __device__ __forceinline__ int32_t Place(int32_t slice) const { return first + slice * Tile::kSlice; }
};

// By one thread.
template <class Tile>
__device__ __forceinline__ void CopyTiles(const KernelParams& params, Ring<Tile> ring) {
  RaggedWalk walk(params.call.plan, params.call.group_sizes);
  RaggedRange range;
  for (int64_t index = blockIdx.x; walk.Find(index, &range); index += gridDim.x) {
    const RaggedPlan& plan = params.call.plan;
    const int32_t matrix = plan.contraction ? range.member : range.member * plan.groups + range.group;
    const Slices<Tile> slices(range);
    for (int32_t slice = 0; slice < slices.count; ++slice) {
      WaitForPhase(ring.empty(), ring.parity() ^ 1);
      ArriveAndExpect(ring.full(), Ring<Tile>::kStageBytes);
      CopyBox(ring.a(), params.a, slices.Place(slice), range.row, range.member, ring.full());
      CopyBox(ring.b(), params.b, slices.Place(slice), range.column, matrix, ring.full());
      ring.Next();
    }
  }
}

// Zeros in both operands' slice before its element `begin` and from `end` on: a NaN there would survive a product with zero.
template <class Tile>
__device__ __forceinline__ void ClearNeighbours(uint8_t* stage, int32_t begin, int32_t end) {
#pragma unroll 1
  for (int row = threadIdx.x; row < Tile::kRows + Tile::kColumns; row += Tile::kThreads) {
#pragma unroll 1
    for (int chunk = 0; chunk < Tile::kSlice / kRaggedChunk; ++chunk) {
      uint8_t* const codes = stage + Tile::Offset(row, chunk);
      const int32_t first = chunk * kRaggedChunk;
      if (first + kRaggedChunk <= begin || first >= end) {
        StoreShared16(codes, 0, 0, 0, 0);
      } else if (first < begin || first + kRaggedChunk > end) {
#pragma unroll 1
        for (int i = 0; i < kRaggedChunk; ++i) {
          if (first + i < begin || first + i >= end) codes[i] = 0;
        }
      }
    }
  }
  ShowToTensorCores();
}

template <class Tile, bool kPrecise>
__device__ __forceinline__ void MultiplyTiles(const KernelParams& params, Ring<Tile> ring) {
  RaggedWalk walk(params.call.plan, params.call.group_sizes);
  RaggedRange range;
  uint32_t clearings = 0;
  for (int64_t index = blockIdx.x; walk.Find(index, &range); index += gridDim.x) {
    Tile tile;
    const Slices<Tile> slices(range);
    uint64_t* before = ring.empty();  // of the slice before, whose products may be under way unless they are precise
#pragma unroll 1
    for (int32_t slice = 0; slice < slices.count; ++slice) {
      WaitForPhase(ring.full(), ring.parity());
      const int32_t place = slices.Place(slice);
      if (params.call.plan.contraction && (place < range.begin || place + Tile::kSlice > range.end)) {
        ClearNeighbours<Tile>(ring.a(), range.begin - place, range.end - place);
        Arrive(ring.cleared());
        WaitForPhase(ring.cleared(), clearings++ % 2);
      }
      tile.Start(ring.a(), ring.b());
      tile.Finish(ring.a(), ring.b(), nullptr);
      if (kPrecise) {
        ring.Release(ring.empty());
      } else if (slice > 0) {
        ring.Release(before);
      }
      before = ring.empty();
      ring.Next();
    }
    tile.End();
    if (!kPrecise && slices.count > 0) ring.Release(before);
    const RaggedMatmulParams& call = params.call;
    const ScaleFactors scales = MultiplyScales(call.a_scale_inv[range.member * call.a_scale_stride],
                                               call.b_scale_inv[range.member * call.b_scale_stride]);
    StoreTile(call.plan, params.output, range, scales, tile);
  }
}

template <class A, class B, bool kPrecise>
using TileOf = WarpgroupTile<A, B, kPrecise, false, 1>;

template <class A, class B, bool kPrecise>
__global__ void __launch_bounds__(TileOf<A, B, kPrecise>::kThreads + kWarpgroupThreads, 1)
    RaggedTmaKernel(const __grid_constant__ KernelParams params) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Tile = TileOf<A, B, kPrecise>;
  const Ring<Tile> ring(DynamicShared<Ring<Tile>::kBytes>());
  if (threadIdx.x == Tile::kThreads) {
    ring.Init();
    ShowToTensorCores();
  }
  __syncthreads();
  if (threadIdx.x >= Tile::kThreads) {
    KeepRegisters<kCopyRegisters>();
    if (threadIdx.x == Tile::kThreads) CopyTiles<Tile>(params, ring);
  } else {
    TakeRegisters<kProductRegisters>();
    MultiplyTiles<Tile, kPrecise>(params, ring);
  }
#endif
}

// Of codes [matrices, rows, length], in boxes of `box_rows` rows of 128 bytes, swizzled as the tensor cores read them.
cudaError_t MakeMap(const void* codes, int64_t matrices, int64_t rows, int64_t length, int box_rows, CUtensorMap* map) {
  const AllowSetupDuringCapture allow_setup;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found;
  JAXFP8_RETURN_IF_CUDA_ERROR(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                                               cudaEnableDefault, &found));
  if (found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
  const cuuint64_t sizes[] = {static_cast<cuuint64_t>(length), static_cast<cuuint64_t>(rows),
                              static_cast<cuuint64_t>(matrices)};
  const cuuint64_t strides[] = {sizes[0], sizes[0] * sizes[1]};
  const cuuint32_t box[] = {kSwizzledRow, static_cast<cuuint32_t>(box_rows), 1}, steps[] = {1, 1, 1};
  const CUresult status = reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)(
      map, CU_TENSOR_MAP_DATA_TYPE_UINT8, 3, const_cast<void*>(codes), sizes, strides, box, steps,
      CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
      CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return status == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <class A, class B, bool kPrecise>
cudaError_t Run(const RaggedMatmulParams& params, cudaStream_t stream) {
  using Tile = TileOf<A, B, kPrecise>;
  int multiprocessors = 0;
  JAXFP8_RETURN_IF_CUDA_ERROR(Multiprocessors(&multiprocessors));
  KernelParams kernel_params = {{}, {}, params, OutputOf(params)};
  RaggedPlan& plan = kernel_params.call.plan;
  plan.column_tile = Tile::kColumns;
  JAXFP8_RETURN_IF_CUDA_ERROR(
      MakeMap(params.a, plan.members, plan.rows, plan.length, Tile::kRows, &kernel_params.a));
  const int64_t matrices = plan.contraction ? plan.members : int64_t{plan.members} * plan.groups;
  JAXFP8_RETURN_IF_CUDA_ERROR(
      MakeMap(params.b, matrices, plan.columns, plan.length, Tile::kColumns, &kernel_params.b));
  const int64_t tiles = plan.MaxTiles();
  return LaunchWithShared(RaggedTmaKernel<A, B, kPrecise>, tiles < multiprocessors ? tiles : multiprocessors,
                          Tile::kThreads + kWarpgroupThreads, Ring<Tile>::kBytes, stream, kernel_params);
}

}  // namespace

cudaError_t LaunchRaggedTma(const RaggedMatmulParams& params, cudaStream_t stream) {
  const RaggedPlan& plan = params.plan;
  const bool has_kernel = !params.blocks && (params.a_dtype == Dtype::kE4M3 || params.b_dtype == Dtype::kE4M3);
  const bool has_maps = HasWholeChunks(params) && plan.rows > 0 && plan.length > 0 && plan.groups > 0 &&
                        int64_t{plan.members} * plan.groups <= kRaggedMaxSize;
  int capability = 0;
  JAXFP8_RETURN_IF_CUDA_ERROR(DeviceAttribute(cudaDevAttrComputeCapabilityMajor, &capability));
  if (!has_kernel || !has_maps || capability != 9) return cudaErrorNotSupported;
  cudaError_t status = cudaErrorInvalidValue;
  DispatchFp8(params.a_dtype, [&](auto a) {
    DispatchFp8(params.b_dtype, [&](auto b) {
      using A = typename decltype(a)::type;
      using B = typename decltype(b)::type;
      if constexpr (std::is_same_v<A, E4M3> || std::is_same_v<B, E4M3>) {
        status = params.precise ? Run<A, B, true>(params, stream) : Run<A, B, false>(params, stream);
      }
    });
  });
  return status;
}

}  // namespace jaxfp8::cuda
