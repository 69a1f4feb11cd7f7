// Counts that several threads add to. Integers: their order does not matter.
#ifndef JAXFP8_CPU_KERNELS_COUNTS_CELL_H_
#define JAXFP8_CPU_KERNELS_COUNTS_CELL_H_

#include "common/counts.h"

namespace jaxfp8::cpu {

// Compiler builtins, because the cell is XLA's memory and not a std::atomic.
inline void AddCounts(Counts* cell, const Counts& counts) {
  __atomic_fetch_add(&cell->saturated, counts.saturated, __ATOMIC_RELAXED);
  __atomic_fetch_add(&cell->flushed, counts.flushed, __ATOMIC_RELAXED);
}

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_COUNTS_CELL_H_
