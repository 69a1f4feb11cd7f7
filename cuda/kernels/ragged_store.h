// How a block of ragged_matmul stores a tile: the rows of its group alone, because the next group's follow them.
#ifndef JAXFP8_CUDA_KERNELS_RAGGED_STORE_H_
#define JAXFP8_CUDA_KERNELS_RAGGED_STORE_H_

#include <cuda_runtime.h>

#include <type_traits>

#include "common/scale_product.h"
#include "cuda/common/memory.h"
#include "cuda/common/ptx.h"
#include "cuda/kernels/ragged_matmul.h"

namespace jaxfp8::cuda {

struct RaggedOutput {
  void* data;
  Dtype dtype;
  bool wide;  // rows are whole, aligned pieces of 16 bytes
};

inline RaggedOutput OutputOf(const RaggedMatmulParams& params) {
  const bool wide = params.plan.columns * ByteWidth(params.out_dtype) % 16 == 0 && IsAligned(params.out, 16);
  return {params.out, params.out_dtype, wide};
}

// Whether rows of a and b are whole, aligned chunks.
inline bool HasWholeChunks(const RaggedMatmulParams& params) {
  return params.plan.length % kRaggedChunk == 0 && IsAligned(params.a, kRaggedChunk) &&
         IsAligned(params.b, kRaggedChunk);
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

// Exchanges two words with the lane whose number differs in bit `kBit`: the lane without the bit takes both first words, the
// lane with it both second ones. Afterwards `first` is that of the lane without the bit.
template <int kBit>
__device__ __forceinline__ void ExchangeWords(uint32_t& first, uint32_t& second) {
  const bool has_bit = threadIdx.x & kBit;
  const uint32_t received = __shfl_xor_sync(0xffffffffu, has_bit ? first : second, kBit);
  first = has_bit ? received : first;
  second = has_bit ? second : received;
}

// Four neighbouring lanes have two columns each of each block of 8. Of as many blocks as make 16 bytes of a lane, `words`,
// each lane takes 16 bytes of one row: then a row is stored in whole sectors.
template <int kBytes>
__device__ __forceinline__ void GatherRow(uint32_t (&words)[4]) {
  if constexpr (kBytes == 2) {
    ExchangeWords<1>(words[0], words[1]);
    ExchangeWords<1>(words[2], words[3]);
    ExchangeWords<2>(words[0], words[2]);
    ExchangeWords<2>(words[1], words[3]);
  } else {
    ExchangeWords<1>(words[0], words[2]);
    ExchangeWords<1>(words[1], words[3]);
  }
}

template <class Out, class Tile>
__device__ __forceinline__ void StoreTileAs(const RaggedPlan& plan, const RaggedOutput& output, const RaggedRange& range,
                                            const ScaleFactors& scales, const Tile& tile) {
  constexpr int kBytes = sizeof(Out), kBlocks = 8 / kBytes;  // that make 16 bytes of a lane
  static_assert(Tile::kColumnBlocks % kBlocks == 0);
  const int lane = threadIdx.x % 32, place = lane % 4;
  const int64_t matrix = plan.contraction ? int64_t{range.member} * plan.groups + range.group : range.member;
  const int32_t first_row = range.row + Tile::FirstRow() + lane / 4, first_column = range.column + Tile::FirstColumn();
  Out* out = static_cast<Out*>(output.data) + (matrix * plan.rows + first_row) * plan.columns + first_column;
#pragma unroll
  for (int i = 0; i < Tile::kRowBlocks; ++i) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = i * 16 + half * 8;
      const int32_t columns = first_row + row < range.row_end ? plan.columns - first_column : 0;
      Out* address = out + int64_t{row} * plan.columns;
#pragma unroll
      for (int j = 0; j < Tile::kColumnBlocks; j += kBlocks) {
        Bytes<16> words;
#pragma unroll
        for (int block = 0; block < kBlocks; ++block) {
          const auto pair = Narrow<Out>(scales.Scale(tile.Sum(i, j + block, 2 * half)),
                                        scales.Scale(tile.Sum(i, j + block, 2 * half + 1)));
#pragma unroll
          for (int w = 0; w < 4 / kBlocks; ++w) words.words[block * (4 / kBlocks) + w] = pair.words[w];
        }
        if (output.wide) {
          GatherRow<kBytes>(words.words);
          const int column = j * 8 + (kBytes == 2 ? place * 8 : place % 2 * 8 + place / 2 * 4);
          if (column < columns) Store(address + column, words);
        } else {
#pragma unroll
          for (int e = 0; e < 2 * kBlocks; ++e) {
            const int column = (j + e / 2) * 8 + place * 2 + e % 2;
            const uint32_t word = kBytes == 2 ? words.words[e / 2] >> (16 * (e % 2)) : words.words[e];
            if (column < columns) Store(address + column, Bytes<kBytes>{{word}});
          }
        }
      }
    }
  }
}

template <class Tile>
__device__ __forceinline__ void StoreTile(const RaggedPlan& plan, const RaggedOutput& output, const RaggedRange& range,
                                          const ScaleFactors& scales, const Tile& tile) {
  switch (output.dtype) {
    case Dtype::kBF16: StoreTileAs<BF16>(plan, output, range, scales, tile); break;
    case Dtype::kF16: StoreTileAs<F16>(plan, output, range, scales, tile); break;
    default: StoreTileAs<F32>(plan, output, range, scales, tile); break;
  }
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_RAGGED_STORE_H_
