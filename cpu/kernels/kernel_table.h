// The inner loops, one table of functions for each instruction set.
//
// The loops see one contiguous span, or one panel of a matrix; groups, chunks and threads are the launchers' business.
// They must run inside a ScopedIeee (float_env.h).
#ifndef JAXFP8_CPU_KERNELS_KERNEL_TABLE_H_
#define JAXFP8_CPU_KERNELS_KERNEL_TABLE_H_

#include <cstdint>
#include <vector>

#include "common/adam.h"
#include "common/block_scale.h"
#include "common/dispatch.h"
#include "common/params.h"
#include "cpu/kernels/chunks.h"

namespace jaxfp8::cpu {

// How results are written: through the cache, or past it (for results that would not stay in it anyway).
enum class Store { kCached, kStreamed };

// A panel (chunks.h PanelChunks) of a row-major matrix x[m, n]. Pointers are to the panel's first element.
struct Panel {
  // Its codes before they are written, row by row: rows that are a power of two apart would compete for the same few
  // lines of the cache.
  static constexpr int64_t kStride = PanelChunks::kColumns + 64;
  static constexpr int64_t kCodes = PanelChunks::kRows * kStride;

  const void* x;
  uint8_t* data;    // row stride n, like x
  uint8_t* data_t;  // row stride m
  int64_t rows, columns;
  int64_t m, n;
};

// The part of a panel whose rows lie in the same row of blocks; each block has a scale.
struct BlockBand {
  // More than one row has at most so many columns, and so many blocks there are at most.
  static constexpr int64_t kColumns = PanelChunks::kColumns;

  const void* x;
  int64_t n;  // from one row of x to the next
  int64_t rows, columns;
  int64_t width;  // columns of a block
  int64_t first;  // how many of them the first block has here or further right
};

// Functions that read x return the amax as float bits (fp8.h AmaxBits). Indices are Index(dtype) below.
struct KernelTable {
  const char* isa;
  uint32_t (*amax[3])(const void* x, int64_t size);
  uint32_t (*quantize[3][2])(const void* x, float scale, uint8_t* data, int64_t size, Store store);
  uint32_t (*quantize_transpose[3][2])(const Panel& panel, float scale, Store store);
  void (*column_sums[3])(const Panel& panel, float* sums);
  // The amax of each block, as float bits; NaN may be above infinity.
  void (*band_amaxes[3])(const BlockBand& band, uint32_t* amaxes);
  // The scale_inv of each block from its amax, and codes with rows `stride` apart; any scale will do.
  void (*quantize_band[3][2])(const BlockBand& band, BlockScaling scaling, const uint32_t* amaxes,
                              uint32_t* scale_invs, uint8_t* codes, int64_t stride);
  // The codes of a panel, rows Panel::kStride apart, to its data and its data_t, each of which may be null.
  void (*write_codes)(uint8_t* codes, const Panel& panel, Store store);
  void (*dequantize[2][3])(const uint8_t* data, float scale_inv, void* out, int64_t size, Store store);
  // The blocks [begin, end) of all rows (moments.h); these run inside a ScopedFlush.
  void (*decode_moment)(const DecodeMomentParams& params, int64_t begin, int64_t end);
  void (*encode_moment)(const EncodeMomentParams& params, int64_t begin, int64_t end);
  void (*adam_update)(const AdamLeaf& leaf, int64_t begin, int64_t end);
};

constexpr int HighPrecisionIndex(Dtype dtype) { return dtype == Dtype::kBF16 ? 0 : dtype == Dtype::kF16 ? 1 : 2; }
constexpr int Fp8Index(Dtype dtype) { return dtype == Dtype::kE4M3 ? 0 : 1; }

extern const KernelTable kPortableKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
#endif

// The tables this processor can run, the fastest last.
std::vector<const KernelTable*> SupportedKernels();

// The fastest table. The vector loops leave out what only unusual scales need, so each op names its scale and gets the
// portable loops for those: for quantize a scale that is NaN, infinite or has its sign set; for dequantize one that is
// not finite, is zero, or has a magnitude above 2^119.
const KernelTable& Kernels();
const KernelTable& KernelsForQuantize(float scale);
const KernelTable& KernelsForDequantize(float scale_inv);

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_KERNEL_TABLE_H_
