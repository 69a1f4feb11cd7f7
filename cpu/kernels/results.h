// Large results: past the cache, and in huge pages.
#ifndef JAXFP8_CPU_KERNELS_RESULTS_H_
#define JAXFP8_CPU_KERNELS_RESULTS_H_

#include <cstdint>

#include "cpu/kernels/kernel_table.h"

namespace jaxfp8::cpu {

// Call before the first write to a result of this many bytes.
//
// A result above 32 MiB comes in pages that the process has never touched. Taking them from the system 4 KiB at a time
// costs ten times what the kernel does; in huge pages, about as much as the kernel. A hint: the contents stay, and
// systems without huge pages ignore it.
void PrepareResult(void* data, int64_t bytes);

// Spans are written in order, so the cache keeps up until it overflows; the bytes are those of the result.
constexpr int64_t kStreamedSpan = int64_t{16} << 20;
// The lines of a transposed result are a row apart. Where that is a power of two they compete for few places in the
// cache, and streaming wins long before it is full.
constexpr int64_t kStreamedTranspose = int64_t{1} << 20;

inline Store StoreFor(int64_t bytes, int64_t streamed) { return bytes < streamed ? Store::kCached : Store::kStreamed; }

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_RESULTS_H_
