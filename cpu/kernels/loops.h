// The loops over spans and panels, written once for all instruction sets.
//
// `Blocks` (blocks_*.cc) supplies the work on 64 elements, or on a tile of 64 x 64; everything else (tails, alignment,
// the choice of stores) is here. Included by one source file for each instruction set, each compiled with its own
// flags: hence the anonymous namespace, without which the linker would keep one copy, perhaps one that this processor
// cannot run. For the same reason nothing here may call an inline function that is not forced inline.
#ifndef JAXFP8_CPU_KERNELS_LOOPS_H_
#define JAXFP8_CPU_KERNELS_LOOPS_H_

#include <cstdint>
#include <cstring>

#include "common/dispatch.h"
#include "common/fp8.h"
#include "cpu/kernels/band_loops.h"
#include "cpu/kernels/chunks.h"
#include "cpu/kernels/half.h"
#include "cpu/kernels/kernel_table.h"
#include "cpu/kernels/map_span.h"
#include "cpu/kernels/moment_loops.h"
#include "cpu/kernels/prefetch.h"

namespace jaxfp8::cpu {
namespace {

template <class Blocks, class In>
uint32_t AmaxSpan(const void* x, int64_t size) {
  const In* in = static_cast<const In*>(x);
  typename Blocks::template Amax<In> amax;
  int64_t i = 0;
  for (; i + kBlock <= size; i += kBlock) amax(in + i);
  if (i < size) {
    alignas(64) In padded[kBlock] = {};
    memcpy(padded, in + i, (size - i) * sizeof(In));
    amax(padded);
  }
  return amax.Bits();
}

template <class Blocks, class In, class Format>
uint32_t QuantizeSpan(const void* x, float scale, uint8_t* data, int64_t size, Store store) {
  typename Blocks::template Quantize<In, Format> quantize(scale);
  MapSpan<Blocks>(quantize, static_cast<const In*>(x), data, size, store);
  if (store == Store::kStreamed) Blocks::Fence();
  return quantize.AmaxBits();
}

template <class Blocks, class Format, class Out>
void DequantizeSpan(const uint8_t* data, float scale_inv, void* out, int64_t size, Store store) {
  typename Blocks::template Dequantize<Format, Out> dequantize(scale_inv);
  MapSpan<Blocks>(dequantize, data, static_cast<Out*>(out), size, store);
  if (store == Store::kStreamed) Blocks::Fence();
}

// The codes of a panel, row after row kStride apart, to its result. Whoever calls fences.
template <class Blocks>
void CopyCodes(const uint8_t* codes, const Panel& panel, Store store) {
  typename Blocks::Copy copy;
  for (int64_t row = 0; row < panel.rows; ++row) {
    MapSpan<Blocks>(copy, codes + row * Panel::kStride, panel.data + row * panel.n, panel.columns, store);
  }
}

// The codes of a panel to its transposed result. (They are not const, which GCC takes for a read of all of them.) Whole
// lines of data_t can be streamed. Tiles follow each other down the rows, so that lines next to each other in memory
// are written soon after each other. A ragged tile is transposed aside, with whatever `codes` holds beyond the panel,
// and only what belongs to the panel is copied.
template <class Blocks>
void TransposeCodes(uint8_t* codes, const Panel& panel, Store store) {
  const bool streamed = Blocks::kStreams && store == Store::kStreamed && panel.m % kBlock == 0 &&
                        reinterpret_cast<uintptr_t>(panel.data_t) % kBlock == 0;
  for (int64_t column = 0; column < panel.columns; column += kBlock) {
    for (int64_t row = 0; row < panel.rows; row += kBlock) {
      const uint8_t* tile = codes + row * Panel::kStride + column;
      uint8_t* out = panel.data_t + column * panel.m + row;
      const int64_t rows = panel.rows - row < kBlock ? panel.rows - row : kBlock;
      const int64_t columns = panel.columns - column < kBlock ? panel.columns - column : kBlock;
      if (rows < kBlock || columns < kBlock) {
        alignas(64) uint8_t transposed[kBlock * kBlock];
        Blocks::template TransposeTile<Store::kCached>(tile, Panel::kStride, transposed, kBlock);
        for (int64_t c = 0; c < columns; ++c) memcpy(out + c * panel.m, transposed + c * kBlock, rows);
      } else if (streamed) {
        Blocks::template TransposeTile<Store::kStreamed>(tile, Panel::kStride, out, panel.m);
      } else {
        Blocks::template TransposeTile<Store::kCached>(tile, Panel::kStride, out, panel.m);
      }
    }
  }
}

// The codes of a panel to those of its results that there are.
template <class Blocks>
void WriteCodes(uint8_t* codes, const Panel& panel, Store store) {
  if (panel.data != nullptr) CopyCodes<Blocks>(codes, panel, store);
  if (panel.data_t != nullptr) TransposeCodes<Blocks>(codes, panel, store);
  if (store == Store::kStreamed) Blocks::Fence();
}

// Two steps over a panel that stays in the cache: quantize along the rows, then transpose tile by tile.
template <class Blocks, class In, class Format>
uint32_t QuantizeTransposePanel(const Panel& panel, float scale, Store store) {
  alignas(64) uint8_t codes[Panel::kCodes];
  typename Blocks::template Quantize<In, Format> quantize(scale);
  typename Blocks::Copy copy;

  const In* x = static_cast<const In*>(panel.x);
  for (int64_t row = 0; row < panel.rows; ++row) {
    PrefetchAhead(x, panel.n * sizeof(In), panel.columns * sizeof(In), panel.rows, row);
    uint8_t* row_codes = codes + row * Panel::kStride;
    MapSpan<Blocks>(quantize, x + row * panel.n, row_codes, panel.columns, Store::kCached);
    MapSpan<Blocks>(copy, row_codes, panel.data + row * panel.n, panel.columns, store);
  }
  TransposeCodes<Blocks>(codes, panel, store);
  if (store == Store::kStreamed) Blocks::Fence();
  return quantize.AmaxBits();
}

// The sums of a panel's columns, row after row in every instruction set: the order decides how sums round. A block's
// sums stay in registers.
template <class In>
void ColumnSumsPanel(const Panel& panel, float* sums) {
  const In* x = static_cast<const In*>(panel.x);
  int64_t column = 0;
  for (; column + kBlock <= panel.columns; column += kBlock) {
    float block[kBlock] = {};
    for (int64_t row = 0; row < panel.rows; ++row) {
      const In* in = x + row * panel.n + column;
      for (int64_t i = 0; i < kBlock; ++i) block[i] += Widen(in[i]);
    }
    memcpy(sums + column, block, sizeof(block));
  }
  for (; column < panel.columns; ++column) {
    float sum = 0;
    for (int64_t row = 0; row < panel.rows; ++row) sum += Widen(x[row * panel.n + column]);
    sums[column] = sum;
  }
}

template <class Blocks>
constexpr KernelTable MakeTable(const char* isa) {
  return {
      isa,
      {AmaxSpan<Blocks, BF16>, AmaxSpan<Blocks, F16>, AmaxSpan<Blocks, F32>},
      {{QuantizeSpan<Blocks, BF16, E4M3>, QuantizeSpan<Blocks, BF16, E5M2>},
       {QuantizeSpan<Blocks, F16, E4M3>, QuantizeSpan<Blocks, F16, E5M2>},
       {QuantizeSpan<Blocks, F32, E4M3>, QuantizeSpan<Blocks, F32, E5M2>}},
      {{QuantizeTransposePanel<Blocks, BF16, E4M3>, QuantizeTransposePanel<Blocks, BF16, E5M2>},
       {QuantizeTransposePanel<Blocks, F16, E4M3>, QuantizeTransposePanel<Blocks, F16, E5M2>},
       {QuantizeTransposePanel<Blocks, F32, E4M3>, QuantizeTransposePanel<Blocks, F32, E5M2>}},
      {ColumnSumsPanel<BF16>, ColumnSumsPanel<F16>, ColumnSumsPanel<F32>},
      {BandAmaxes<BF16>, BandAmaxes<F16>, BandAmaxes<F32>},
      {{QuantizeBand<Blocks, BF16, E4M3>, QuantizeBand<Blocks, BF16, E5M2>},
       {QuantizeBand<Blocks, F16, E4M3>, QuantizeBand<Blocks, F16, E5M2>},
       {QuantizeBand<Blocks, F32, E4M3>, QuantizeBand<Blocks, F32, E5M2>}},
      WriteCodes<Blocks>,
      {{DequantizeSpan<Blocks, E4M3, BF16>, DequantizeSpan<Blocks, E4M3, F16>, DequantizeSpan<Blocks, E4M3, F32>},
       {DequantizeSpan<Blocks, E5M2, BF16>, DequantizeSpan<Blocks, E5M2, F16>, DequantizeSpan<Blocks, E5M2, F32>}},
      DecodeMomentBlocks,
      EncodeMomentBlocks,
      AdamUpdateBlocks,
  };
}

}  // namespace
}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_LOOPS_H_
