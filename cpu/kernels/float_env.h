// IEEE arithmetic for the length of a scope: XLA's threads run with subnormals flushed to zero.
#ifndef JAXFP8_CPU_KERNELS_FLOAT_ENV_H_
#define JAXFP8_CPU_KERNELS_FLOAT_ENV_H_

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jaxfp8::cpu {

// Keeps subnormals (as operands and as results) and rounds to nearest even; restores the thread's mode at the end.
//
// The compiler does not know that arithmetic depends on these registers and may move it out of the scope. Inside one,
// do arithmetic only in functions called through a pointer, which it cannot see into.
class ScopedIeee {
 public:
  ScopedIeee(const ScopedIeee&) = delete;
  ScopedIeee& operator=(const ScopedIeee&) = delete;

#if defined(__x86_64__)
  ScopedIeee() : saved_(_mm_getcsr()) { _mm_setcsr(kDefaultMxcsr); }
  ~ScopedIeee() { _mm_setcsr(saved_); }

 private:
  static constexpr uint32_t kDefaultMxcsr = 0x1f80;  // no FTZ, no DAZ, nearest even, all exceptions masked
  uint32_t saved_;
#elif defined(__aarch64__)
  ScopedIeee() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t{0}));
  }
  ~ScopedIeee() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
  ScopedIeee() {}  // unknown machine: taken to be IEEE
#endif
};

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_FLOAT_ENV_H_
