// Prefetching of panels: the hardware prefetches along a row, but a panel's rows are too short for it to get going.
#ifndef JAXFP8_CPU_KERNELS_PREFETCH_H_
#define JAXFP8_CPU_KERNELS_PREFETCH_H_

#include <cstdint>

namespace jaxfp8::cpu {

// Asks for what a panel's rows are kRowsAhead rows from now. `x` is its first element; rows are `stride` bytes apart,
// and `width` bytes long. After the last row comes the panel to the right, the next chunk. Forced inline: a call of a
// function that does nothing but prefetch is one that GCC removes.
__attribute__((always_inline)) inline void PrefetchAhead(const void* x, int64_t stride, int64_t width, int64_t rows,
                                                         int64_t row) {
  constexpr int64_t kRowsAhead = 8, kLine = 64;
  const int64_t ahead = row + kRowsAhead;
  const int64_t offset = ahead < rows ? ahead * stride : (ahead - rows) * stride + width;
  // An integer, because the address may lie beyond the array; there a prefetch does nothing.
  const uintptr_t begin = reinterpret_cast<uintptr_t>(x) + offset;
  for (uintptr_t line = begin; line < begin + width; line += kLine) {
    __builtin_prefetch(reinterpret_cast<const void*>(line));
  }
}

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_PREFETCH_H_
