// quantize_blocks_transpose: one read of x, codes and scales of both layouts written.
//
// A block of threads takes tiles of 128 x 128 (common/transpose_tile.h), which hold whole blocks of either layout. The
// tile stays in registers, while its amaxes and then its scales pass through shared memory:
//
//   amaxes    a thread puts down those of its 8 rows and of its columns
//   scales    one half of the threads has a row each, the other a column: the rest of the reduction, the division or
//             exponent, and the store of scale_inv where the product reads it (scale_mode.h)
//   codes     each element twice, by the scale of its row block and that of its column block
//
// Whole rows do not fit a tile: one kernel finds the amaxes of rows and columns, a second reads x again.
#include "cuda/kernels/quantize_blocks_transpose.h"

#include <cuda_runtime.h>

#include "cuda/common/amax.h"
#include "cuda/common/convert.h"
#include "cuda/common/launch.h"
#include "cuda/common/transpose_tile.h"
#include "cuda/kernels/block_tile.h"
#include "cuda/kernels/scale_mode.h"

namespace jaxfp8::cuda {
namespace {

// Blocks of threads on a multiprocessor. The tile of 16-bit floats is 32 registers a thread, that of f32 64. Four blocks
// are for Hopper: on 8.9 and 12.x shared memory holds three, and on 10.x the compiler would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ == 900
constexpr int kBlocksOfHalves = 4;
#else
constexpr int kBlocksOfHalves = 3;
#endif
constexpr int MinBlocks(int element_bytes, bool wide_rows) {
  return !wide_rows ? 1 : element_bytes == 2 ? kBlocksOfHalves : 2;
}

template <class In>
struct KernelParams {
  TransposePlan plan;
  const In* x;
  uint8_t* data;
  uint8_t* data_t;
  Lines lines[2];  // rows, columns
  BlockScaling scaling;
  bool wide_columns;  // 16-byte pieces of data_t are aligned, and its rows are whole pieces
};

// The factors of a tile's blocks in shared memory: [rows, columns][block along the line][line].
template <int kShift>
using TileFactors = float[2][kTileSide >> kShift][kStride];

// One scale_inv, f32 or E8M0.
__device__ __forceinline__ void StoreScale(void* scales, int64_t index, const BlockScale& scale,
                                           BlockScaling scaling) {
  if (IsE8M0(scaling)) {
    static_cast<uint8_t*>(scales)[index] = static_cast<uint8_t>(scale.scale_inv);
  } else {
    static_cast<float*>(scales)[index] = BitsToFloat(scale.scale_inv);
  }
}

template <class Format, int kBlocks>
__device__ __forceinline__ void FindScales(const uint32_t (&amaxes)[kBlocks], BlockScaling scaling,
                                           BlockScale (&scales)[kBlocks]) {
  if (IsE8M0(scaling)) {
    const bool ceil = scaling == BlockScaling::kE8M0Ceil;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) scales[b] = AmaxToE8M0Scale<Format>(amaxes[b], ceil);
  } else {
    const bool power_of_2 = scaling == BlockScaling::kF32PowerOf2;
#pragma unroll
    for (int b = 0; b < kBlocks; ++b) scales[b] = AmaxToF32Scale<Format>(amaxes[b], power_of_2);
  }
}

// Stores the scales that a tile has along a line, where a product reads them.
template <BlockShape kBlock, int kBlocks>
__device__ __forceinline__ void StoreScales(const Lines& lines, const Line& line, const BlockScale (&scales)[kBlocks],
                                            BlockScaling scaling) {
  const int64_t first = line.group * lines.group_stride + line.tile * lines.tile_stride + line.along * lines.along_stride;
  if constexpr (kBlock == BlockShape::k1x32) {
    // Lines and blocks outside of the matrix too: a product reads whole tiles.
    const int64_t index = first + line.index % 32 * 16 + line.index / 32 * 4;
    if (IsE8M0(scaling)) {
      const uint32_t low = scales[0].scale_inv | (scales[1].scale_inv << 8);
      const uint32_t high = scales[2].scale_inv | (scales[3].scale_inv << 8);
      Store<4>(static_cast<uint8_t*>(lines.scale_inv) + index, {{low | (high << 16)}});
    } else {
      Store<16>(static_cast<float*>(lines.scale_inv) + index,
                {{scales[0].scale_inv, scales[1].scale_inv, scales[2].scale_inv, scales[3].scale_inv}});
    }
  } else if constexpr (kBlock == BlockShape::k128x128) {
    // The first line stores the scale of all, the next ones zeros that round the blocks up to a multiple of 4.
    const bool is_last = line.along == lines.tiles_along - 1;
    if (line.index > (is_last ? 3 - line.along % 4 : 0)) return;
    StoreScale(lines.scale_inv, first + line.index, line.index == 0 ? scales[0] : BlockScale{}, scaling);
  } else {
    if (line.index >= line.inside || (kBlock == BlockShape::kRow && line.along != 0)) return;
    StoreScale(lines.scale_inv, first + line.index, scales[0], scaling);
  }
}

// How `kBlock`s of so many lines have their scales.
template <BlockShape kBlock>
Lines MakeLines(int64_t count, int64_t length, const float* amaxes, void* scale_inv) {
  const int64_t tiles = CeilDiv(count, kTileSide), along = CeilDiv(length, kTileSide);
  switch (kBlock) {
    case BlockShape::kRow: return {count, amaxes, scale_inv, count, kTileSide, 0, along};
    case BlockShape::k1x32: return {count, amaxes, scale_inv, tiles * along * 512, along * 512, 512, along};
    case BlockShape::k1x128: return {count, amaxes, scale_inv, along * count, kTileSide, count, along};
    case BlockShape::k128x128: break;
  }
  const int64_t padded = CeilDiv(along, 4) * 4;
  return {count, amaxes, scale_inv, tiles * padded, padded, 1, along};
}

// The code that the hardware converts NaN to.
constexpr uint8_t kHardwareNanCode = 0x7f;

// Stores the codes of a thread's elements to data, and those of the other layout to `tile_t`.
template <class Format, int kShift, bool kWideRows, bool kHasNan, class In>
__device__ __forceinline__ void QuantizeElements(const KernelParams<In>& params, const Tile& tile,
                                                 const Elements<In>& x, const TileFactors<kShift>& factors,
                                                 uint8_t* tile_t) {
  constexpr int kVector = Elements<In>::kVector;
  const auto round = [](float y0, float y1, float y2, float y3) {
    return kHasNan ? RoundFour<Format>(y0, y1, y2, y3) : RoundFourNumbers<Format>(y0, y1, y2, y3);
  };
  constexpr int kPatch = 4;  // a word of codes is of 4 columns of a row, or 4 rows of a column
#pragma unroll
  for (int s = 0; s < Elements<In>::kShares; ++s) {
    const auto share = Elements<In>::ShareAt(s);
    const int row = share.FirstRow(), column = share.FirstColumn();
    uint8_t* data = params.data + Elements<In>::template Offset<kWideRows>(params.plan, tile, share);
    const float* by_row = factors[0][column >> kShift] + row;
    const float* by_column = factors[1][row >> kShift] + column;
    uint32_t columns[kVector][kRows / kPatch];
    const int inside = column < tile.columns ? tile.rows - row : 0;
#pragma unroll
    for (int top = 0; top < kRows; top += kPatch) {
      Bytes<kVector> rows[kPatch];
#pragma unroll
      for (int left = 0; left < kVector; left += kPatch) {
        float patch[kPatch][kPatch];
#pragma unroll
        for (int r = 0; r < kPatch; ++r) {
#pragma unroll
          for (int c = 0; c < kPatch; ++c) patch[r][c] = Widen<In>(x.vectors[s][top + r].words, left + c);
          const float by = by_row[top + r];
          rows[r].words[left / kPatch] = round(__fmul_rn(patch[r][0], by), __fmul_rn(patch[r][1], by),
                                               __fmul_rn(patch[r][2], by), __fmul_rn(patch[r][3], by));
        }
#pragma unroll
        for (int c = 0; c < kPatch; ++c) {
          const float by = by_column[left + c];
          columns[left + c][top / kPatch] = round(__fmul_rn(patch[0][c], by), __fmul_rn(patch[1][c], by),
                                                  __fmul_rn(patch[2][c], by), __fmul_rn(patch[3][c], by));
        }
      }
#pragma unroll
      for (int r = 0; r < kPatch; ++r) {
        uint8_t* address = data + (top + r) * params.plan.n;
        if constexpr (!kWideRows) {
          StoreCodes(address, rows[r], share.Valid(tile, top + r));
        } else if constexpr (kVector == 8) {
          StoreGlobal8If(top + r < inside, address, rows[r].words[0], rows[r].words[1]);
        } else {
          StoreGlobal4If(top + r < inside, address, rows[r].words[0]);
        }
      }
    }
    if (params.data_t == nullptr) continue;
#pragma unroll
    for (int c = 0; c < kVector; ++c) {
      uint8_t* slot = tile_t + SlotOffset(column + c, share.row_group, SwizzleKey(share.column_group));
      *reinterpret_cast<uint2*>(slot) = make_uint2(columns[c][0], columns[c][1]);
    }
  }
}

// What a tile has of the amaxes of whole rows and columns. They start at 0.
template <class In, bool kWideRows>
__global__ void __launch_bounds__(kBlockSize, MinBlocks(sizeof(In), kWideRows))
    LineAmaxesKernel(TransposePlan plan, const In* x, float* rows, float* columns) {
  __shared__ TileAmaxes<In> amaxes;
  for (int64_t index = blockIdx.x; index < plan.tiles; index += gridDim.x) {
    const Tile tile = kWideRows ? plan.AtSmall(index) : plan.At(index);
    Elements<In> elements;
    elements.template Load<kWideRows>(plan, tile, x);
    amaxes.Put(elements, columns != nullptr);
    __syncthreads();
    const Line line(tile);
    if (line.index < line.inside) {
      if (!line.is_column) {
        RaiseAmax(rows + tile.group * plan.m + tile.row + line.index, amaxes.template OfRow<7>(0, line.index));
      } else if (columns != nullptr) {
        RaiseAmax(columns + tile.group * plan.n + tile.column + line.index, amaxes.template OfColumn<7>(0, line.index));
      }
    }
    __syncthreads();
  }
}

template <class In, class Format, BlockShape kBlock, bool kWideRows>
__global__ void __launch_bounds__(kBlockSize, MinBlocks(sizeof(In), kWideRows))
    QuantizeBlocksTransposeKernel(KernelParams<In> params) {
  constexpr int kShift = Shift(kBlock);
  constexpr int kBlocks = kTileSide >> kShift;
  alignas(16) __shared__ uint8_t tile_t[kTileSide * kTileSide];
  __shared__ Amaxes<In, kBlock> amaxes;
  alignas(16) __shared__ TileFactors<kShift> factors;

  for (int64_t index = blockIdx.x; index < params.plan.tiles; index += gridDim.x) {
    const Tile tile = kWideRows ? params.plan.AtSmall(index) : params.plan.At(index);
    const bool transposes = params.data_t != nullptr;
    Elements<In> x;
    x.template Load<kWideRows>(params.plan, tile, params.x);
    amaxes.Put(x, transposes);
    // Also without amaxes: the last tile's factors may still be read.
    __syncthreads();

    const Line line(tile);
    const Lines& lines = params.lines[line.is_column];
    bool is_finite = true;
    if (!line.is_column || transposes) {
      uint32_t own[kBlocks];
      BlockScale scales[kBlocks];
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) {
        own[b] = amaxes.Of(lines, line, b);
        is_finite = is_finite && own[b] < kInfBits;
      }
      FindScales<Format>(own, params.scaling, scales);
#pragma unroll
      for (int b = 0; b < kBlocks; ++b) factors[line.is_column][b][line.index] = scales[b].factor;
      StoreScales<kBlock>(lines, line, scales, params.scaling);
    }
    // An infinity would saturate where its block has a factor that is not NaN.
    const bool has_nan = __syncthreads_or(!is_finite);
    if (has_nan) x.InfinitiesToNan();
    // Where rows are wide, finite tiles have code of their own, without what the codes of NaN need.
    if (Format::kNanCode != kHardwareNanCode && (has_nan || !kWideRows)) {
      QuantizeElements<Format, kShift, kWideRows, true>(params, tile, x, factors, tile_t);
    } else {
      QuantizeElements<Format, kShift, kWideRows, false>(params, tile, x, factors, tile_t);
    }
    if (transposes) {
      __syncthreads();
      // The next tile's codes come after two more barriers.
      StoreTransposed<16 / sizeof(In)>(params.plan, tile, tile_t, params.data_t, params.wide_columns);
    }
  }
}

template <class In, class Format, BlockShape kBlock, bool kWideRows>
cudaError_t Run(const QuantizeBlocksTransposeParams& params, cudaStream_t stream) {
  int multiprocessors = 0;
  JAXFP8_RETURN_IF_CUDA_ERROR(Multiprocessors(&multiprocessors));
  constexpr bool kOfRows = kBlock == BlockShape::kRow;
  const bool transposes = params.data_t != nullptr;
  float* row_amaxes = kOfRows ? params.amaxes : nullptr;
  float* column_amaxes = kOfRows && transposes ? params.amaxes + params.groups * params.m : nullptr;
  const KernelParams<In> kernel_params = {
      MakeTransposePlan(params.groups, params.m, params.n),
      static_cast<const In*>(params.x),
      static_cast<uint8_t*>(params.data),
      static_cast<uint8_t*>(params.data_t),
      {MakeLines<kBlock>(params.m, params.n, row_amaxes, params.scale_inv),
       MakeLines<kBlock>(params.n, params.m, column_amaxes, params.scale_inv_t)},
      params.scaling,
      params.m % 16 == 0 && IsAligned(params.data_t, 16),
  };
  const TransposePlan& plan = kernel_params.plan;
  const int64_t max_blocks = int64_t{multiprocessors} * kBlocksPerMultiprocessor;
  const int64_t blocks = plan.tiles < max_blocks ? plan.tiles : max_blocks;
  if constexpr (kOfRows) {
    const int64_t count = params.groups * (params.m + (transposes ? params.n : 0));
    JAXFP8_RETURN_IF_CUDA_ERROR(SetZero(params.amaxes, count, stream));
    JAXFP8_RETURN_IF_CUDA_ERROR(Launch(LineAmaxesKernel<In, kWideRows>, blocks, kBlockSize, stream, plan,
                                       kernel_params.x, row_amaxes, column_amaxes));
  }
  return Launch(QuantizeBlocksTransposeKernel<In, Format, kBlock, kWideRows>, blocks, kBlockSize, stream,
                kernel_params);
}

template <BlockShape kBlock>
cudaError_t Run(const QuantizeBlocksTransposeParams& params, cudaStream_t stream) {
  cudaError_t status = cudaErrorInvalidValue;
  DispatchHighPrecision(params.dtype, [&](auto in) {
    DispatchFp8(params.format, [&](auto format) {
      using In = typename decltype(in)::type;
      using Format = typename decltype(format)::type;
      constexpr int kVector = 16 / sizeof(In);
      const bool wide_rows = params.n % kVector == 0 && IsAligned(params.x, 16) && IsAligned(params.data, kVector) &&
                             MakeTransposePlan(params.groups, params.m, params.n).is_small;
      status = wide_rows ? Run<In, Format, kBlock, true>(params, stream)
                         : Run<In, Format, kBlock, false>(params, stream);
    });
  });
  return status;
}

}  // namespace

cudaError_t LaunchQuantizeBlocksTranspose(const QuantizeBlocksTransposeParams& params, cudaStream_t stream) {
  if (params.groups == 0 || params.m == 0 || params.n == 0) return cudaSuccess;
  switch (params.block) {
    case BlockShape::kRow: return Run<BlockShape::kRow>(params, stream);
    case BlockShape::k1x32: return Run<BlockShape::k1x32>(params, stream);
    case BlockShape::k1x128: return Run<BlockShape::k1x128>(params, stream);
    case BlockShape::k128x128: return Run<BlockShape::k128x128>(params, stream);
  }
  return cudaErrorInvalidValue;
}

}  // namespace jaxfp8::cuda
