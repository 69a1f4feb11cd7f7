// The floating-point mode for the length of a scope: XLA's threads run with subnormals flushed to zero.
#ifndef JAXFP8_CPU_KERNELS_FLOAT_ENV_H_
#define JAXFP8_CPU_KERNELS_FLOAT_ENV_H_

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace jaxfp8::cpu {

// Rounds to nearest even, and keeps subnormals or flushes them, as operands and as results; restores the thread's mode
// at the end.
//
// The compiler does not know that arithmetic depends on these registers and may move it out of the scope. Inside one,
// do arithmetic only in functions called through a pointer, which it cannot see into.
class ScopedFloatMode {
 public:
  ScopedFloatMode(const ScopedFloatMode&) = delete;
  ScopedFloatMode& operator=(const ScopedFloatMode&) = delete;

#if defined(__x86_64__)
 protected:
  explicit ScopedFloatMode(bool flush) : saved_(_mm_getcsr()) { _mm_setcsr(flush ? kMasked | kFlush : kMasked); }
  ~ScopedFloatMode() { _mm_setcsr(saved_); }

 private:
  static constexpr uint32_t kMasked = 0x1f80;  // no FTZ, no DAZ, nearest even, all exceptions masked
  static constexpr uint32_t kFlush = 0x8040;   // FTZ, DAZ
  uint32_t saved_;
#elif defined(__aarch64__)
 protected:
  explicit ScopedFloatMode(bool flush) {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved_));
    __asm__ volatile("msr fpcr, %0" : : "r"(uint64_t{flush} << 24));  // FZ
  }
  ~ScopedFloatMode() { __asm__ volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  uint64_t saved_;
#else
 protected:
  explicit ScopedFloatMode(bool) {}  // unknown machine: taken to be IEEE
#endif
};

// IEEE arithmetic.
class ScopedIeee : ScopedFloatMode {
 public:
  ScopedIeee() : ScopedFloatMode(false) {}
};

// The arithmetic of XLA's threads, whoever calls.
class ScopedFlush : ScopedFloatMode {
 public:
  ScopedFlush() : ScopedFloatMode(true) {}
};

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_FLOAT_ENV_H_
