// Huge pages for large results, where the system lets a program ask for them.
#include "cpu/kernels/results.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

namespace jaxfp8::cpu {

void PrepareResult(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr int64_t kWorthACall = int64_t{4} << 20;  // also NumPy's choice
  if (bytes < kWorthACall) return;
  // Of all huge pages that it touches: one that it shares with a neighbour counts only if all of it is asked for.
  constexpr uintptr_t kHugePage = uintptr_t{2} << 20;
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data) / kHugePage * kHugePage;
  const uintptr_t last = reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes) - 1;
  const uintptr_t end = (last / kHugePage + 1) * kHugePage;
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}

}  // namespace jaxfp8::cpu
