// The loops over bands, rows of blocks that have a scale each, written once for all instruction sets.
//
// Included by loops.h, and subject to what it says. Comparisons are of magnitudes as signed integers of the input's own
// width: their order is that of the numbers, NaN is above infinity, and every instruction set has the maximum.
#ifndef JAXFP8_CPU_KERNELS_BAND_LOOPS_H_
#define JAXFP8_CPU_KERNELS_BAND_LOOPS_H_

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/block_scale.h"
#include "cpu/kernels/half.h"
#include "cpu/kernels/kernel_table.h"
#include "cpu/kernels/map_span.h"

namespace jaxfp8::cpu {
namespace {

constexpr int64_t kMxBlock = 32;  // a size that the compiler is told: a vector or two in place of a loop

template <class In>
using Magnitude = std::conditional_t<sizeof(In) == 2, int16_t, int32_t>;

inline int32_t MagnitudeOf(F32 x) { return FloatToBits(x) & kAbsMask; }
inline int16_t MagnitudeOf(BF16 x) { return x.bits & 0x7fff; }
inline int16_t MagnitudeOf(F16 x) { return x.bits & 0x7fff; }

// A magnitude as the bits of a float.
template <class In>
uint32_t ToFloatBits(Magnitude<In> magnitude) {
  if constexpr (std::is_same_v<In, F32>) {
    return magnitude;
  } else {
    return FloatToBits(Widen(In{static_cast<uint16_t>(magnitude)}));
  }
}

// Calls visit(index, begin, end) for each block of a band, with the columns that it has there.
template <class Visitor>
void ForEachBlock(const BlockBand& band, const Visitor& visit) {
  int64_t begin = 0, end = band.first;
  for (int64_t index = 0; begin < band.columns; ++index, begin = end, end += band.width) {
    visit(index, begin, end < band.columns ? end : band.columns);
  }
}

template <class In>
Magnitude<In> Largest(const In* x, int64_t size) {
  Magnitude<In> largest = 0;
  for (int64_t i = 0; i < size; ++i) {
    const Magnitude<In> magnitude = MagnitudeOf(x[i]);
    largest = magnitude > largest ? magnitude : largest;
  }
  return largest;
}

// The magnitude that each of kBlock columns reaches in `rows` rows; they stay in registers.
template <class In>
void LargestOfColumns(const In* x, int64_t stride, int64_t rows, int64_t columns, In* out) {
  for (int64_t begin = 0; begin < columns; begin += kBlock) {
    Magnitude<In> largest[kBlock] = {};
    const int64_t count = columns - begin < kBlock ? columns - begin : kBlock;
    for (int64_t row = 0; row < rows; ++row) {
      const In* in = x + row * stride + begin;
      const auto raise = [&](int64_t i) {
        const Magnitude<In> magnitude = MagnitudeOf(in[i]);
        largest[i] = magnitude > largest[i] ? magnitude : largest[i];
      };
      if (count == kBlock) {
        for (int64_t i = 0; i < kBlock; ++i) raise(i);
      } else {
        for (int64_t i = 0; i < count; ++i) raise(i);
      }
    }
    memcpy(out + begin, largest, count * sizeof(In));
  }
}

// The amax of each block of a band, as float bits; NaN may be above infinity.
template <class In>
void BandAmaxes(const BlockBand& band, uint32_t* amaxes) {
  const In* x = static_cast<const In*>(band.x);
  In largest[BlockBand::kColumns];
  if (band.rows > 1) {
    LargestOfColumns(x, band.n, band.rows, band.columns, largest);
    x = largest;
  }
  ForEachBlock(band, [&](int64_t index, int64_t begin, int64_t end) {
    const bool is_mx = end - begin == kMxBlock;
    amaxes[index] = ToFloatBits<In>(is_mx ? Largest(x + begin, kMxBlock) : Largest(x + begin, end - begin));
  });
}

// The factor and the scale_inv of each block of a band, as BlockScale has them; returns whether a scale is NaN. One loop
// for each kind of scale, so that it is vectorised. A function of its own, which the dtypes of x share.
template <class Format>
bool BandScales(BlockScaling scaling, const uint32_t* amaxes, int64_t count, float* factors, uint32_t* scale_invs) {
  int any_nan = 0;
  const auto is = [&](auto kind) {
    constexpr BlockScaling kScaling = decltype(kind)::value;
    if (scaling != kScaling) return;
    for (int64_t i = 0; i < count; ++i) {
      const BlockScale scale = AmaxToBlockScale<Format>(amaxes[i], kScaling);
      factors[i] = scale.factor;
      scale_invs[i] = scale.scale_inv;
      any_nan |= IsE8M0(kScaling) && amaxes[i] >= kInfBits;
    }
  };
  is(std::integral_constant<BlockScaling, BlockScaling::kF32>{});
  is(std::integral_constant<BlockScaling, BlockScaling::kF32PowerOf2>{});
  is(std::integral_constant<BlockScaling, BlockScaling::kE8M0Ceil>{});
  is(std::integral_constant<BlockScaling, BlockScaling::kE8M0Floor>{});
  return any_nan != 0;
}

// Quantizes a band whose blocks have these amaxes. Gives the scale_inv of each block as BlockScale has it.
template <class Blocks, class In, class Format>
void QuantizeBand(const BlockBand& band, BlockScaling scaling, const uint32_t* amaxes, uint32_t* scale_invs,
                  uint8_t* codes, int64_t stride) {
  constexpr int64_t kColumns = BlockBand::kColumns;
  // 1. The scale of each block.
  float factors[kColumns + kBlock];
  const int64_t count = 1 + (band.columns > band.first ? (band.columns - band.first - 1) / band.width + 1 : 0);
  const bool any_nan = BandScales<Format>(scaling, amaxes, count, factors, scale_invs);

  // 2. The scale of each column, and the codes of all rows. A ragged end is computed with scales of nothing.
  float each[kColumns + kBlock];
  for (int64_t i = 0; i < kBlock; ++i) factors[count + i] = each[kColumns + i] = 1.0f;
  int64_t block = 0, end = band.first;
  for (int64_t begin = 0; begin < band.columns; begin += kColumns) {
    const int64_t limit = band.columns - begin < kColumns ? band.columns : begin + kColumns;
    const float* scales = factors;
    if (band.width > 1) {
      scales = each;
      for (int64_t column = begin; column < limit;) {
        const int64_t stop = end < limit ? end : limit;
        float* scale = each + column - begin;
        if (stop - column == kMxBlock) {
          for (int64_t i = 0; i < kMxBlock; ++i) scale[i] = factors[block];
        } else {
          for (int64_t i = 0; i < stop - column; ++i) scale[i] = factors[block];
        }
        column = stop;
        if (stop == end) ++block, end += band.width;
      }
      for (int64_t i = limit - begin; i < kColumns; ++i) each[i] = 1.0f;
    }
    for (int64_t row = 0; row < band.rows; ++row) {
      typename Blocks::template QuantizeEach<In, Format> quantize(scales);
      const In* x = static_cast<const In*>(band.x) + row * band.n;
      MapSpan<Blocks>(quantize, x + begin, codes + row * stride + begin, limit - begin, Store::kCached);
    }
  }

  // 3. No vector loop knows a scale that is NaN.
  if (!any_nan) return;
  ForEachBlock(band, [&](int64_t index, int64_t begin, int64_t end) {
    if (amaxes[index] < kInfBits) return;
    for (int64_t row = 0; row < band.rows; ++row) memset(codes + row * stride + begin, Format::kNanCode, end - begin);
  });
}

}  // namespace
}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_BAND_LOOPS_H_
