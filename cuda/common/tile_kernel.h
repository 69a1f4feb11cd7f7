// The kernel that quantizes matrices tile by tile, whatever their values are made of.
//
// A block takes tiles of 128 x 128 (transpose_tile.h). A producer says what a thread loads of a row and which f32 values
// that makes; everything else is here. A producer is a struct of pointers, and a parameter of the kernel:
//
//   In                             the dtype that decides how many columns a thread has: 16 bytes
//   kQuantizesInput                the values are those of x, and Row::x holds them: the amax is taken of pairs
//   kSumsColumns                   `column_sums` takes the sum of each column of a tile
//   kParts                         1; or 2: the result is [m, 2, n], and a tile has 64 columns of each part, whose
//                                  threads load the same and tell their part from the share
//   Columns<..>(share)             what is loaded once for all rows of a share
//   kBlocks                        kTileBlocks, or fewer, with more registers
//   Row, Load<..>(share, r)        what is loaded of row `r` of a share
//   Values(columns, row, values)   the f32 values of that row
//
// Codes of numbers need no more than a product and a conversion. Infinities and NaN need more, and an amax that is not
// finite tells that there are some: then, and only then, a thread makes its codes again, element by element, with the
// Multiplier of convert.h. So the common path has none of what that costs.
#ifndef JAXFP8_CUDA_COMMON_TILE_KERNEL_H_
#define JAXFP8_CUDA_COMMON_TILE_KERNEL_H_

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

#include "common/column_sums.h"
#include "common/params.h"
#include "cuda/common/amax.h"
#include "cuda/common/convert.h"
#include "cuda/common/launch.h"
#include "cuda/common/transpose_tile.h"

namespace jaxfp8::cuda {

static_assert(kTileSide == kColumnSumRows, "a tile is a part of the sums");

// Blocks on a multiprocessor, which caps the registers at 64 a thread: 1024 threads with some 100 bytes each in flight.
// Compute capability 12.x has less bandwidth a multiprocessor, and with four blocks LayerNorm would spill there.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1200
constexpr int kTileBlocks = 3;
#else
constexpr int kTileBlocks = 4;
#endif

// What the kernel is given besides its producer.
struct TileTask {
  TransposePlan plan;
  const float* scale;
  int64_t scale_stride;
  uint8_t* data;
  uint8_t* data_t;  // null: not wanted
  float* amax;      // null: not wanted
  int64_t amax_stride;
  bool wide_columns;  // 16-byte pieces of data_t are aligned, and its rows are whole pieces
  bool wide_rows;  // vectors of x and data are aligned, rows are whole vectors, and the plan is small
};

// Where a thread's rows and columns of a tile are in matrices `[groups, m, n]`.
//
// Vectors that lie outside are loaded from the nearest row and columns inside: their values change no amax, their codes
// are not stored, and the loads need no predicates. Of single elements only columns may lie outside; they are zero.
template <class In, Access kAccess, int kParts = 1>
struct MatrixShare {
  static constexpr int kVector = 16 / sizeof(In);
  static constexpr int kWidth = kTileSide / kParts;
  // Vectors are in small matrices, where a product of two sizes costs one instruction.
  using Size = std::conditional_t<kAccess == Access::kElements, int64_t, uint32_t>;
  using Offset = std::conditional_t<kAccess == Access::kElements, int64_t, uint64_t>;

  Size group;
  Offset row;   // the first, among the rows of all groups
  Size column;  // the first
  Size n;
  int rows;     // of the share, inside the matrix; may be negative
  int columns;  // likewise
  int part;     // of the result

  __device__ __forceinline__ MatrixShare(const TransposePlan& plan, const Tile& tile, const TileShare<kVector>& share)
      : group(static_cast<Size>(tile.group)),
        n(static_cast<Size>(plan.n)),
        rows(tile.rows - share.FirstRow()),
        columns(tile.columns - ColumnOfPart<kWidth>(share.FirstColumn())),
        part(PartOf<kWidth>(share.FirstColumn())) {
    int first_row = share.FirstRow(), first_column = ColumnOfPart<kWidth>(share.FirstColumn());
    if (kAccess == Access::kEdgeTile) {
      first_row = min(first_row, tile.rows - 1);
      first_column = min(first_column, tile.columns - kVector);
    }
    row = static_cast<Offset>(group) * static_cast<Size>(plan.m) + static_cast<Size>(tile.row) + first_row;
    column = static_cast<Size>(tile.column) + first_column;
  }

  // How many columns of row `r` are inside, if positive.
  __device__ __forceinline__ int Valid(int r) const { return r < rows ? columns : 0; }

  // Row `r` in a matrix whose rows are `kInterleaved` times n elements; the part of it that is `part`.
  template <int kInterleaved = 1, class T>
  __device__ __forceinline__ T* Row(T* matrix, int r, int part = 0) const {
    return matrix + row * kInterleaved * n + column + static_cast<Offset>(r * kInterleaved + part) * n;
  }
  // The row inside from which to load row `r`.
  __device__ __forceinline__ int RowInside(int r) const {
    return kAccess == Access::kEdgeTile ? min(r, max(rows - 1, 0)) : r;
  }
  template <int kInterleaved = 1>
  __device__ __forceinline__ Bytes<16> Load(const In* matrix, int r, int part = 0) const {
    const In* const first = Row<kInterleaved>(matrix, RowInside(r), part);
    if constexpr (kAccess == Access::kElements) return LoadElements<kVector>(first, Valid(r));
    return cuda::Load<16>(first);
  }
};

// Sums of columns, for producers that want them: a thread adds up its 8 rows, and through shared memory 128 threads add
// up the 16 row groups of a tile. One part a tile, always in the same order; no atomics.
template <class In>
class TileSums {
 public:
  static constexpr int kVector = 16 / sizeof(In);
  using Share = TileShare<kVector>;

  __device__ __forceinline__ void Put(const Share& share, const float (&sums)[kVector]) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
      sums_[share.row_group * kStride + i * share.kColumnGroups + share.column_group] = sums[i];
    }
  }
  __device__ __forceinline__ float Total(int column) const {
    const float* parts = sums_ + column % kVector * Share::kColumnGroups + column / kVector;
    float sum = 0.0f;
#pragma unroll
    for (int row_group = 0; row_group < Share::kRowGroups; ++row_group) sum += parts[row_group * kStride];
    return sum;
  }

 private:
  // Half-warps, which have two row groups of 16-bit floats, meet different banks.
  static constexpr int kStride = kTileSide + 16;
  float sums_[Share::kRowGroups * kStride];
};

struct NoSums {};

// What a block has of a tile in shared memory.
template <class Producer>
struct SharedTile {
  static constexpr bool kSums = Producer::kSumsColumns;

  alignas(16) uint8_t codes_t[kTileSide * kTileSide];
  BlockAmax<kWarpsPerBlock> amax;
  std::conditional_t<kSums, TileSums<typename Producer::In>, NoSums> sums;
};

template <class Producer>
using ProducerAmax = AmaxAccumulator<std::conditional_t<Producer::kQuantizesInput, typename Producer::In, F32>>;

// One row of a thread's share: adds its values to the amax and to the sums, and stores its codes.
template <class Format, Access kAccess, class Producer, class Share, class Columns, int kVector>
__device__ __forceinline__ Bytes<kVector> QuantizeRow(const TileTask& task, const Producer& producer, const Share& share,
                                                      const Columns& columns, const typename Producer::Row& row, int r,
                                                      float scale, ProducerAmax<Producer>& amax,
                                                      float (&sums)[kVector]) {
  float values[kVector];
  producer.Values(columns, row, values);
  if constexpr (Producer::kQuantizesInput) {
    amax.Add(row.x);
  } else {
#pragma unroll
    for (int i = 0; i < kVector; ++i) amax.Add(values[i]);
  }
  if constexpr (Producer::kSumsColumns) {
#pragma unroll
    for (int i = 0; i < kVector; ++i) sums[i] += kAccess == Access::kEdgeTile && r >= share.rows ? 0.0f : values[i];
  }
  Bytes<kVector> codes;
#pragma unroll
  for (int i = 0; i < kVector; i += 4) {
    if constexpr (kAccess == Access::kElements) {
      codes.words[i / 4] =
          QuantizeFour<Format>(values[i], values[i + 1], values[i + 2], values[i + 3], Multiplier(scale));
    } else {
      codes.words[i / 4] =
          RoundFourNumbers<Format>(__fmul_rn(values[i], scale), __fmul_rn(values[i + 1], scale),
                                   __fmul_rn(values[i + 2], scale), __fmul_rn(values[i + 3], scale));
    }
  }
  StoreVector<kAccess>(share.template Row<Producer::kParts>(task.data, r, share.part), codes, share.Valid(r));
  return codes;
}

// A thread's share of a tile: codes to data, and transposed to shared memory.
template <class Format, Access kAccess, class Producer>
__device__ __forceinline__ void QuantizeShare(const TileTask& task, const Producer& producer, const Tile& tile,
                                              const TileShare<16 / sizeof(typename Producer::In)>& place, float scale,
                                              ProducerAmax<Producer>& amax, SharedTile<Producer>& shared) {
  using In = typename Producer::In;
  constexpr int kVector = 16 / sizeof(In);
  const MatrixShare<In, kAccess, Producer::kParts> share(task.plan, tile, place);
  const auto columns = producer.template LoadColumns<kAccess>(share);
  float sums[kVector] = {};
  const auto quantize_row = [&](const typename Producer::Row& row, int r) {
    return QuantizeRow<Format, kAccess>(task, producer, share, columns, row, r, scale, amax, sums);
  };
  // All 8 rows of a whole tile at once. Otherwise fewer, in a loop: code that runs rarely must not take registers.
  constexpr int kRowsAtOnce = kAccess == Access::kWholeTile ? kRows : kAccess == Access::kEdgeTile ? 4 : 1;
#pragma unroll 1
  for (int top = 0; top < kRows; top += kRowsAtOnce) {
    if (kAccess == Access::kElements && top >= share.rows) break;
    Bytes<kVector> codes[kRowsAtOnce];
    typename Producer::Row rows[kRowsAtOnce];
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) rows[r] = producer.template Load<kAccess>(share, top + r);
#pragma unroll
    for (int r = 0; r < kRowsAtOnce; ++r) codes[r] = quantize_row(rows[r], top + r);
    if (task.data_t != nullptr) PutTransposed(place, codes, shared.codes_t, top);
  }
  if constexpr (Producer::kSumsColumns) shared.sums.Put(place, sums);
}

// One kernel serves wide rows and others: both need the path element by element, which is most of the code.
template <class Producer, class Format>
__global__ void __launch_bounds__(kBlockSize, Producer::kBlocks)
    TileKernel(const __grid_constant__ TileTask task, const __grid_constant__ Producer producer) {
  constexpr int kVector = 16 / sizeof(typename Producer::In);
  constexpr int kWidth = kTileSide / Producer::kParts;
  using Place = TileShare<kVector>;
  __shared__ SharedTile<Producer> shared;

  for (int64_t index = blockIdx.x; index < task.plan.tiles; index += gridDim.x) {
    const Tile tile = task.wide_rows ? task.plan.AtSmall<kWidth>(index) : task.plan.At<kWidth>(index);
    const float scale = task.scale[tile.group * task.scale_stride];
    ProducerAmax<Producer> amax;
#pragma unroll 1
    for (int first = 0; first < Place::kRowGroups; first += Place::kRowGroupsAtOnce) {
      const Place place = {static_cast<int>(threadIdx.x % Place::kColumnGroups),
                           first + static_cast<int>(threadIdx.x / Place::kColumnGroups)};
      const auto quantize_share = [&](auto access) {
        QuantizeShare<Format, decltype(access)::value>(task, producer, tile, place, scale, amax, shared);
      };
      if (task.wide_rows) {
        if (tile.IsWhole<kWidth>()) {
          quantize_share(AccessTag<Access::kWholeTile>{});
        } else {
          quantize_share(AccessTag<Access::kEdgeTile>{});
        }
        if (max(amax.Bits(), FloatToBits(scale) & kAbsMask) < kInfBits) continue;
      }
      quantize_share(AccessTag<Access::kElements>{});
    }
    if (task.amax != nullptr) shared.amax.Put(amax.OverWarp());
    __syncthreads();
    if (task.amax != nullptr) shared.amax.Raise(task.amax + tile.group * task.amax_stride);
    if constexpr (Producer::kSumsColumns) {
      const int column = threadIdx.x;
      if (column < kTileSide && ColumnOfPart<kWidth>(column) < tile.columns) {
        const int64_t n = task.plan.n, first = PartOf<kWidth>(column) * n + tile.column;
        const int64_t part = tile.group * ColumnSumParts(task.plan.m) + tile.row / kColumnSumRows;
        producer.column_sums[part * Producer::kParts * n + first + ColumnOfPart<kWidth>(column)] = shared.sums.Total(column);
      }
    }
    if (task.data_t != nullptr) {
      StoreTransposed<kVector, Producer::kParts>(task.plan, tile, shared.codes_t, task.data_t, task.wide_columns);
    }
    __syncthreads();
  }
}

// Starts the amaxes and launches the kernel. `aligned`: what the producer loads besides x allows vectors.
template <class Producer>
cudaError_t LaunchTiles(const TileParams& params, const Producer& producer, bool aligned, cudaStream_t stream) {
  const int64_t amaxes = AmaxCount(params.amax_stride, params.groups);
  JAXFP8_RETURN_IF_CUDA_ERROR(StartAmax(params.amax, params.amax_so_far, amaxes, stream));
  if (params.groups == 0 || params.m == 0 || params.n == 0) return cudaSuccess;
  int multiprocessors = 0;
  JAXFP8_RETURN_IF_CUDA_ERROR(Multiprocessors(&multiprocessors));
  const TransposePlan plan = MakeTransposePlan(params.groups, params.m, params.n, kTileSide / Producer::kParts);
  constexpr int kVector = 16 / sizeof(typename Producer::In);
  const bool wide_rows = aligned && params.n % kVector == 0 && IsAligned(params.x, 16) &&
                         IsAligned(params.data, kVector) && plan.is_small;
  const TileTask task = {
      plan,
      params.scale,
      params.scale_stride,
      static_cast<uint8_t*>(params.data),
      static_cast<uint8_t*>(params.data_t),
      params.amax,
      params.amax_stride,
      params.m % 16 == 0 && IsAligned(params.data_t, 16),
      wide_rows,
  };
  const int64_t max_blocks = int64_t{multiprocessors} * kBlocksPerMultiprocessor;
  const int64_t blocks = plan.tiles < max_blocks ? plan.tiles : max_blocks;
  cudaError_t status = cudaErrorInvalidValue;
  DispatchFp8(params.format, [&](auto format) {
    using Format = typename decltype(format)::type;
    status = Launch(TileKernel<Producer, Format>, blocks, kBlockSize, stream, task, producer);
  });
  return status;
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_COMMON_TILE_KERNEL_H_
