// The inner loops, one table of functions for each instruction set.
//
// The loops see one contiguous span, or one panel of a matrix; groups, chunks and threads are the launchers' business.
// They must run inside a ScopedIeee (float_env.h).
#ifndef JAXFP8_CPU_KERNELS_KERNEL_TABLE_H_
#define JAXFP8_CPU_KERNELS_KERNEL_TABLE_H_

#include <cstdint>
#include <vector>

#include "common/dispatch.h"

namespace jaxfp8::cpu {

// How results are written: through the cache, or past it (for results that would not stay in it anyway).
enum class Store { kCached, kStreamed };

// A panel (chunks.h PanelChunks) of a row-major matrix x[m, n]. Pointers are to the panel's first element.
struct Panel {
  const void* x;
  uint8_t* data;    // row stride n, like x
  uint8_t* data_t;  // row stride m
  int64_t rows, columns;
  int64_t m, n;
};

// Functions that read x return the amax as float bits (fp8.h AmaxBits). Indices are Index(dtype) below.
struct KernelTable {
  const char* isa;
  uint32_t (*amax[3])(const void* x, int64_t size);
  uint32_t (*quantize[3][2])(const void* x, float scale, uint8_t* data, int64_t size, Store store);
  uint32_t (*quantize_transpose[3][2])(const Panel& panel, float scale, Store store);
  void (*column_sums[3])(const Panel& panel, float* sums);
  void (*dequantize[2][3])(const uint8_t* data, float scale_inv, void* out, int64_t size, Store store);
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
