// quantize_blocks_transpose: one read of x, codes and scales of both layouts written.
//
// A block of threads takes tiles of 128 x 128 (common/transpose_tile.h), which hold whole blocks of either layout. The
// tile stays in registers, while its amaxes and then its scales pass through shared memory:
//
//   amaxes    a thread has those of its 8 rows and its columns; lanes reduce rows, shared memory columns
//   scales    one thread for each block: the division or exponent, and the store of scale_inv
//   codes     each element twice, by the scale of its row block and that of its column block
//
// Whole rows do not fit a tile: one kernel finds the amaxes of rows and columns, a second reads x again.
#include "cuda/kernels/quantize_blocks_transpose.h"

#include <cuda_runtime.h>

#include "cuda/common/amax.h"
#include "cuda/common/convert.h"
#include "cuda/common/launch.h"
#include "cuda/common/transpose_tile.h"

namespace jaxfp8::cuda {
namespace {

constexpr int kMaxBlocks = kTileSide / 32;  // blocks along a row or a column of a tile
// From one block's line to the next in shared memory: lanes of two blocks read different banks.
constexpr int kStride = kTileSide + 4;
// Blocks of threads on a multiprocessor: the tile of 16-bit floats is 32 registers a thread, that of f32 64.
constexpr int MinBlocks(int element_bytes, bool wide_rows) { return !wide_rows ? 1 : element_bytes == 2 ? 3 : 2; }

// Scales of blocks along the lines of a layout: rows of x for data, columns of x for data_t.
struct Lines {
  int64_t count;        // m for data, n for data_t
  int64_t length;       // n for data, m for data_t
  void* scale_inv;      // null where the layout is not written
  const float* amaxes;  // of whole lines, [groups, count]; null where blocks are smaller
};

template <class In>
struct KernelParams {
  TransposePlan plan;
  const In* x;
  uint8_t* data;
  uint8_t* data_t;
  Lines rows;
  Lines columns;
  int shift;  // a block is 2^shift elements along a line: 32 or 128
  bool is_square;
  BlockScaling scaling;
  bool wide_columns;  // 16-byte pieces of data_t are aligned, and its rows are whole pieces
};

// A thread's part of a tile.
template <class In>
struct Elements {
  static constexpr int kVector = 16 / sizeof(In);
  using Share = TileShare<kVector>;
  static constexpr int kShares = Share::kRowGroups / Share::kRowGroupsAtOnce;

  __device__ __forceinline__ static Share ShareAt(int i) {
    return {static_cast<int>(threadIdx.x % Share::kColumnGroups),
            i * Share::kRowGroupsAtOnce + static_cast<int>(threadIdx.x / Share::kColumnGroups)};
  }
  // Of its first element in x and data.
  __device__ __forceinline__ static int64_t Offset(const TransposePlan& plan, const Tile& tile, const Share& share) {
    return (tile.group * plan.m + tile.row + share.FirstRow()) * plan.n + tile.column + share.FirstColumn();
  }

  template <Access kAccess>
  __device__ __forceinline__ void Load(const TransposePlan& plan, const Tile& tile, const In* x) {
#pragma unroll
    for (int i = 0; i < kShares; ++i) {
      const Share share = ShareAt(i);
      const In* first = x + Offset(plan, tile, share);
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        vectors[i][r] = LoadVector<kAccess>(first + r * plan.n, share.Valid(tile, r));
      }
    }
  }

  Bytes<16> vectors[kShares][kRows];
};

// The amaxes of a tile in shared memory, as bits.
struct TileAmaxes {
  uint32_t rows[kMaxBlocks][kStride];                  // [block along the row][row]
  alignas(16) uint32_t columns[kTileSide / kRows][kTileSide];  // [8 rows][column]

  // Of the `block`th 2^shift rows of a column.
  __device__ __forceinline__ uint32_t OfColumn(int block, int column, int shift) const {
    const int groups = (1 << shift) / kRows;
    uint32_t largest = 0;
    for (int i = 0; i < groups; ++i) largest = max(largest, columns[block * groups + i][column]);
    return largest;
  }
  // Of all rows of a tile with one block a row; the same in every lane.
  __device__ __forceinline__ uint32_t OfTile() const {
    uint32_t largest = 0;
#pragma unroll
    for (int row = 0; row < kTileSide; row += kWarpSize) {
      largest = max(largest, rows[0][row + threadIdx.x % kWarpSize]);
    }
    return __reduce_max_sync(0xffffffffu, largest);
  }
};

// The factors of a tile's blocks in shared memory.
struct TileFactors {
  alignas(16) float rows[kMaxBlocks][kStride];
  alignas(16) float columns[kMaxBlocks][kStride];
};

template <class In>
__device__ __forceinline__ void FindAmaxes(const Elements<In>& x, int shift, bool of_columns, TileAmaxes& amaxes) {
  constexpr int kVector = Elements<In>::kVector;
  const int lanes = (1 << shift) / kVector;  // that share a block of a row
#pragma unroll
  for (int s = 0; s < Elements<In>::kShares; ++s) {
    const auto share = Elements<In>::ShareAt(s);
    uint32_t columns[kVector] = {};
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      uint32_t row = 0;
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const uint32_t magnitude = FloatToBits(Widen<In>(x.vectors[s][r].words, i)) & kAbsMask;
        row = max(row, magnitude);
        columns[i] = max(columns[i], magnitude);
      }
      for (int other = 1; other < lanes; other *= 2) row = max(row, __shfl_xor_sync(0xffffffffu, row, other));
      if (share.column_group % lanes == 0) {
        amaxes.rows[share.FirstColumn() >> shift][share.FirstRow() + r] = row;
      }
    }
    if (of_columns) {
#pragma unroll
      for (int i = 0; i < kVector; ++i) amaxes.columns[share.row_group][share.FirstColumn() + i] = columns[i];
    }
  }
}

// The factors of the blocks along the lines of a tile, by all threads; the lines `first` to `first` + `inside` of all,
// and of each the elements `begin` to `begin` + `length`. `amax_of(block, line)`: bits.
template <class Format, class In, class AmaxOf>
__device__ __forceinline__ void FindFactors(const KernelParams<In>& params, const Lines& lines, int64_t group,
                                            int64_t first, int inside, int64_t begin, int length, AmaxOf amax_of,
                                            float (&factors)[kMaxBlocks][kStride]) {
  const int shift = params.shift;
  const bool is_whole = lines.amaxes != nullptr;
  const int64_t blocks = is_whole ? 1 : ((lines.length - 1) >> shift) + 1;
  const int64_t block_begin = is_whole ? 0 : begin >> shift;
  const int64_t line_begin = params.is_square ? group * (((lines.count - 1) >> shift) + 1) + (first >> shift)
                                              : group * lines.count + first;
  for (int i = threadIdx.x; i < kTileSide << (7 - shift); i += kBlockSize) {
    const int line = i % kTileSide;
    const int block = i / kTileSide;
    if (line >= inside || (block << shift) >= length) continue;  // no code asks for it
    const BlockScale scale = AmaxToBlockScale<Format>(amax_of(block, line), params.scaling);
    factors[block][line] = scale.factor;
    // One tile of a whole line and one line of a square stores what they all have.
    if ((is_whole && begin != 0) || (params.is_square && line != 0)) continue;
    const int64_t index = (line_begin + line) * blocks + block_begin + block;
    if (IsE8M0(params.scaling)) {
      static_cast<uint8_t*>(lines.scale_inv)[index] = static_cast<uint8_t>(scale.scale_inv);
    } else {
      static_cast<float*>(lines.scale_inv)[index] = BitsToFloat(scale.scale_inv);
    }
  }
}

// Stores the codes of a thread's elements to data, and those of the other layout to `tile_t`.
template <class Format, Access kAccess, class In>
__device__ __forceinline__ void QuantizeElements(const KernelParams<In>& params, const Tile& tile,
                                                 const Elements<In>& x, const TileFactors& factors, uint8_t* tile_t) {
  constexpr int kVector = Elements<In>::kVector;
#pragma unroll
  for (int s = 0; s < Elements<In>::kShares; ++s) {
    const auto share = Elements<In>::ShareAt(s);
    uint8_t* data = params.data + Elements<In>::Offset(params.plan, tile, share);
    const float* by_row = factors.rows[share.FirstColumn() >> params.shift] + share.FirstRow();
#pragma unroll
    for (int r = 0; r < kRows; ++r) {
      const Multiplier multiply(by_row[r]);
      Bytes<kVector> codes;
#pragma unroll
      for (int w = 0; w < kVector / 4; ++w) {
        const uint32_t* words = x.vectors[s][r].words;
        codes.words[w] = QuantizeFour<Format>(Widen<In>(words, 4 * w), Widen<In>(words, 4 * w + 1),
                                              Widen<In>(words, 4 * w + 2), Widen<In>(words, 4 * w + 3), multiply);
      }
      StoreVector<kAccess>(data + r * params.plan.n, codes, share.Valid(tile, r));
    }
    if (params.data_t == nullptr) continue;
    const float* by_column = factors.columns[share.FirstRow() >> params.shift] + share.FirstColumn();
    Bytes<kVector> codes[kRows];
#pragma unroll
    for (int w = 0; w < kVector / 4; ++w) {
      const Multiplier multiply[4] = {Multiplier(by_column[4 * w]), Multiplier(by_column[4 * w + 1]),
                                      Multiplier(by_column[4 * w + 2]), Multiplier(by_column[4 * w + 3])};
#pragma unroll
      for (int r = 0; r < kRows; ++r) {
        const uint32_t* words = x.vectors[s][r].words;
        codes[r].words[w] = RoundFour<Format>(
            multiply[0](Widen<In>(words, 4 * w)), multiply[1](Widen<In>(words, 4 * w + 1)),
            multiply[2](Widen<In>(words, 4 * w + 2)), multiply[3](Widen<In>(words, 4 * w + 3)));
      }
    }
    PutTransposed(share, codes, tile_t);
  }
}

// Calls `visit(AccessTag)` for how a tile's rows are reached.
template <bool kWideRows, class Visitor>
__device__ __forceinline__ void VisitAccess(const Tile& tile, Visitor&& visit) {
  if constexpr (!kWideRows) {
    visit(AccessTag<Access::kElements>{});
  } else if (tile.IsWhole()) {
    visit(AccessTag<Access::kWholeTile>{});
  } else {
    visit(AccessTag<Access::kEdgeTile>{});
  }
}

// What a tile has of the amaxes of whole rows and columns. They start at 0.
template <class In, bool kWideRows>
__global__ void __launch_bounds__(kBlockSize, MinBlocks(sizeof(In), kWideRows))
    LineAmaxesKernel(TransposePlan plan, const In* x, float* rows, float* columns) {
  __shared__ TileAmaxes amaxes;
  for (int64_t index = blockIdx.x; index < plan.tiles; index += gridDim.x) {
    const Tile tile = plan.At(index);
    Elements<In> elements;
    VisitAccess<kWideRows>(tile, [&](auto access) {
      elements.template Load<decltype(access)::value>(plan, tile, x);
    });
    FindAmaxes(elements, 7, columns != nullptr, amaxes);
    __syncthreads();
    const int line = threadIdx.x % kTileSide;
    if (threadIdx.x < kTileSide) {
      if (line < tile.rows) RaiseAmax(rows + tile.group * plan.m + tile.row + line, amaxes.rows[0][line]);
    } else if (columns != nullptr && line < tile.columns) {
      RaiseAmax(columns + tile.group * plan.n + tile.column + line, amaxes.OfColumn(0, line, 7));
    }
    __syncthreads();
  }
}

template <class In, class Format, bool kWideRows>
__global__ void __launch_bounds__(kBlockSize, MinBlocks(sizeof(In), kWideRows))
    QuantizeBlocksTransposeKernel(KernelParams<In> params) {
  alignas(16) __shared__ uint8_t tile_t[kTileSide * kTileSide];
  __shared__ TileAmaxes amaxes;
  __shared__ TileFactors factors;

  for (int64_t index = blockIdx.x; index < params.plan.tiles; index += gridDim.x) {
    const Tile tile = params.plan.At(index);
    const bool is_whole = params.rows.amaxes != nullptr;
    const bool transposes = params.data_t != nullptr;
    Elements<In> x;
    VisitAccess<kWideRows>(tile, [&](auto access) {
      x.template Load<decltype(access)::value>(params.plan, tile, params.x);
    });
    if (!is_whole) FindAmaxes(x, params.shift, transposes && !params.is_square, amaxes);
    // Also without amaxes: the last tile's factors may still be read.
    __syncthreads();

    const uint32_t of_tile = params.is_square ? amaxes.OfTile() : 0;
    const auto of_row = [&](int block, int row) {
      if (is_whole) return FloatToBits(params.rows.amaxes[tile.group * params.plan.m + tile.row + row]);
      return params.is_square ? of_tile : amaxes.rows[block][row];
    };
    const auto of_column = [&](int block, int column) {
      if (is_whole) return FloatToBits(params.columns.amaxes[tile.group * params.plan.n + tile.column + column]);
      return params.is_square ? of_tile : amaxes.OfColumn(block, column, params.shift);
    };
    FindFactors<Format>(params, params.rows, tile.group, tile.row, tile.rows, tile.column, tile.columns, of_row,
                        factors.rows);
    if (transposes) {
      FindFactors<Format>(params, params.columns, tile.group, tile.column, tile.columns, tile.row, tile.rows,
                          of_column, factors.columns);
    }
    __syncthreads();

    VisitAccess<kWideRows>(tile, [&](auto access) {
      QuantizeElements<Format, decltype(access)::value>(params, tile, x, factors, tile_t);
    });
    if (transposes) {
      __syncthreads();
      // The next tile's codes come after two more barriers.
      StoreTransposed<16 / sizeof(In)>(params.plan, tile, tile_t, params.data_t, params.wide_columns);
    }
  }
}

template <class In, class Format, bool kWideRows>
cudaError_t Run(const QuantizeBlocksTransposeParams& params, cudaStream_t stream) {
  int multiprocessors = 0;
  JAXFP8_RETURN_IF_CUDA_ERROR(Multiprocessors(&multiprocessors));
  const bool of_rows = params.block == BlockShape::kRow;
  const bool transposes = params.data_t != nullptr;
  float* row_amaxes = of_rows ? params.amaxes : nullptr;
  float* column_amaxes = of_rows && transposes ? params.amaxes + params.groups * params.m : nullptr;
  const KernelParams<In> kernel_params = {
      MakeTransposePlan(params.groups, params.m, params.n),
      static_cast<const In*>(params.x),
      static_cast<uint8_t*>(params.data),
      static_cast<uint8_t*>(params.data_t),
      {params.m, params.n, params.scale_inv, row_amaxes},
      {params.n, params.m, params.scale_inv_t, column_amaxes},
      params.block == BlockShape::k1x32 ? 5 : 7,
      params.block == BlockShape::k128x128,
      params.scaling,
      params.m % 16 == 0 && IsAligned(params.data_t, 16),
  };
  const TransposePlan& plan = kernel_params.plan;
  const int64_t max_blocks = int64_t{multiprocessors} * kBlocksPerMultiprocessor;
  const int64_t blocks = plan.tiles < max_blocks ? plan.tiles : max_blocks;
  if (of_rows) {
    const int64_t count = params.groups * (params.m + (transposes ? params.n : 0));
    JAXFP8_RETURN_IF_CUDA_ERROR(cudaMemsetAsync(params.amaxes, 0, count * sizeof(float), stream));
    JAXFP8_RETURN_IF_CUDA_ERROR(Launch(LineAmaxesKernel<In, kWideRows>, blocks, kBlockSize, stream, plan,
                                       kernel_params.x, row_amaxes, column_amaxes));
  }
  return Launch(QuantizeBlocksTransposeKernel<In, Format, kWideRows>, blocks, kBlockSize, stream, kernel_params);
}

}  // namespace

cudaError_t LaunchQuantizeBlocksTranspose(const QuantizeBlocksTransposeParams& params, cudaStream_t stream) {
  if (params.groups == 0 || params.m == 0 || params.n == 0) return cudaSuccess;
  cudaError_t status = cudaErrorInvalidValue;
  DispatchHighPrecision(params.dtype, [&](auto in) {
    DispatchFp8(params.format, [&](auto format) {
      using In = typename decltype(in)::type;
      using Format = typename decltype(format)::type;
      constexpr int kVector = 16 / sizeof(In);
      const bool wide_rows = params.n % kVector == 0 && IsAligned(params.x, 16) && IsAligned(params.data, kVector);
      status = wide_rows ? Run<In, Format, true>(params, stream) : Run<In, Format, false>(params, stream);
    });
  });
  return status;
}

}  // namespace jaxfp8::cuda
