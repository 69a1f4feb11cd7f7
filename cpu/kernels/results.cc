// Huge pages for large results, where the system lets a program ask for them.
#include "cpu/kernels/results.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace jaxfp8::cpu {

void PrepareResult(void* data, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr int64_t kWorthACall = int64_t{4} << 20;  // also NumPy's choice
  if (bytes < kWorthACall) return;
  const uintptr_t page = static_cast<uintptr_t>(sysconf(_SC_PAGESIZE));
  // From the beginning of the first page: a huge page at the front counts only if all of it is asked for.
  const uintptr_t begin = reinterpret_cast<uintptr_t>(data) / page * page;
  const uintptr_t end = reinterpret_cast<uintptr_t>(data) + static_cast<uintptr_t>(bytes);
  madvise(reinterpret_cast<void*>(begin), end - begin, MADV_HUGEPAGE);
#else
  (void)data;
  (void)bytes;
#endif
}

}  // namespace jaxfp8::cpu
