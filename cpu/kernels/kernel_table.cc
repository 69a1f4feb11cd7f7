// Which instruction set: asked of the processor once, at run time.
#include "cpu/kernels/kernel_table.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace jaxfp8::cpu {
namespace {

#if defined(__x86_64__)
// __builtin_cpu_supports knows whether the system saves the registers, but not every compiler's knows F16C.
bool HasF16c() {
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid(1, &eax, &ebx, &ecx, &edx) && (ecx & (1u << 29));
}

bool HasAvx2() { return __builtin_cpu_supports("avx2") && HasF16c(); }

bool HasAvx512() {
  return HasAvx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
}
#endif

// Bits, not comparisons: this runs on threads that flush subnormals.
uint32_t Magnitude(float scale) { return FloatToBits(scale) & kAbsMask; }

}  // namespace

std::vector<const KernelTable*> SupportedKernels() {
  std::vector<const KernelTable*> tables = {&kPortableKernels};
#if defined(__x86_64__)
  if (HasAvx2()) tables.push_back(&kAvx2Kernels);
  if (HasAvx512()) tables.push_back(&kAvx512Kernels);
#endif
  return tables;
}

const KernelTable& Kernels() {
  static const KernelTable& kernels = *SupportedKernels().back();
  return kernels;
}

const KernelTable& KernelsForQuantize(float scale) {
  return FloatToBits(scale) < kInfBits ? Kernels() : kPortableKernels;
}

const KernelTable& KernelsForDequantize(float scale_inv) {
  constexpr uint32_t kLargest = (127u + 119u) << 23;
  const uint32_t magnitude = Magnitude(scale_inv);
  return 0 < magnitude && magnitude <= kLargest ? Kernels() : kPortableKernels;
}

}  // namespace jaxfp8::cpu
