// A step of Adam whose moments are in FP8: what the CPU and CUDA kernels of adam_update are given, and the arithmetic of
// an element, to the bit (jaxfp8/ops/_adam_update.py has the definition).
//
// No operation has a subnormal operand, and what can be subnormal is flushed: threads that flush and others agree.
#ifndef JAXFP8_COMMON_ADAM_H_
#define JAXFP8_COMMON_ADAM_H_

#include <cstdint>

#include "common/fp8.h"
#include "common/moment.h"
#include "common/scale.h"

namespace jaxfp8 {

// All pointers of a call travel as the parameter of one kernel launch, which has room for 4 KiB.
constexpr int kMaxLeaves = 16;

// A moment and the one after the step, which may be in the same buffers.
struct AdamMoment {
  const uint8_t* data;     // e4m3 [rows, n]
  const float* amax;       // [rows, ceil(n / 128)]
  const int8_t* exponent;  // [rows, ceil(n / 128)]
  const uint32_t* keys;    // of the random bits [rows, ceil(n / 128)]
  uint8_t* next_data;      // e4m3 [rows, n]
  float* next_amax;        // [rows, ceil(n / 128)]
  int8_t* next_exponent;   // [rows, ceil(n / 128)]
};

struct AdamLeaf {
  const float* grads;   // [rows, n]
  const float* params;  // [rows, n], or null: `out` is the update
  float* out;           // [rows, n]; may be `grads`, or `params` where there are any
  AdamMoment mu, nu;
  const float* hyper;  // [hypers, kAdamHypers]
  int64_t rows;
  int64_t n;
  int64_t rows_per_hyper;  // at least 1
};

struct AdamUpdateParams {
  AdamLeaf leaves[kMaxLeaves];
  int64_t count;
  bool apply;
};

static_assert(sizeof(AdamUpdateParams) <= 4096 - 16 * kMaxLeaves);

// A row of `hyper`.
struct AdamHyper {
  float b1, a1, b2, a2;    // a1 = 1 - b1, a2 = 1 - b2
  float c1, c2;            // 1 / (1 - b1^t), 1 / (1 - b2^t)
  float eps_root, eps;
  float rate, decay;       // of the next parameters
  float factor;            // of gradients
};
constexpr int64_t kAdamHypers = sizeof(AdamHyper) / sizeof(float);

// Rounded once, as products are.
JAXFP8_HD float Sum(float x, float y) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(x, y);
#else
  return x + y;
#endif
}

// The arithmetic of a step. CUDA has another of the same results, for numbers of which it flushes none.
struct AdamMath {
  // Subnormal numbers count as zero.
  static JAXFP8_HD float Input(float x) { return __builtin_fabsf(x) < 0x1p-126f ? 0.0f : x; }

  // Terms below 2^-102 are zeros: differences and sums of others are multiples of 2^-125.
  static JAXFP8_HD float Term(float x) { return __builtin_fabsf(x) < 0x1p-102f ? 0.0f : x; }
  static JAXFP8_HD float Term(float x, float y) { return Term(Product(x, y)); }

  // Of squares, which have no sign, no sum is subnormal if no term is; a platform may flush a term below 2^-126.
  static JAXFP8_HD float Square(float x, float y) {
    const float product = Product(x, y);
    return product < 0x1p-125f ? 0.0f : product;
  }

  static JAXFP8_HD float SquareRoot(float x) { return Root(x); }
  static JAXFP8_HD float Quotient(float x, float y) { return Term(Divide(x, y)); }
};

template <class Math = AdamMath>
JAXFP8_HD float AdamGrad(const AdamHyper& hyper, float grad) {
  return Math::Term(Math::Input(grad), hyper.factor);
}

// The moments after the step, of AdamGrad and the moments before.
template <class Math = AdamMath>
JAXFP8_HD float NextMu(const AdamHyper& hyper, float mu, float grad) {
  return Sum(Math::Term(hyper.a1, grad), Math::Term(hyper.b1, mu));
}
template <class Math = AdamMath>
JAXFP8_HD float NextNu(const AdamHyper& hyper, float nu, float grad) {
  return Sum(Math::Square(hyper.a2, Math::Square(grad, grad)), Math::Square(hyper.b2, __builtin_fabsf(nu)));
}

template <class Math = AdamMath>
JAXFP8_HD float AdamUpdate(const AdamHyper& hyper, float mu, float nu) {
  const float root = Math::SquareRoot(Sum(Product(nu, hyper.c2), hyper.eps_root));
  return Math::Quotient(Product(mu, hyper.c1), Sum(root, hyper.eps));
}

template <class Math = AdamMath>
JAXFP8_HD float AdamApply(const AdamHyper& hyper, float update, float param) {
  const float x = Math::Input(param), decayed = Sum(update, Math::Term(hyper.decay, x));
  return Sum(x, -Math::Term(hyper.rate, decayed));
}

// What stands for a mu or a nu that is not finite: a NaN whose code depends on no platform. With a sign it stands for an
// infinite nu.
JAXFP8_HD float EncodedMu(float mu) {
  return __builtin_fabsf(mu) < BitsToFloat(kInfBits) ? mu : BitsToFloat(0x7fc00000u);
}
JAXFP8_HD float EncodedNu(float nu) {
  const float infinity = BitsToFloat(kInfBits);
  return __builtin_fabsf(nu) < infinity ? nu : BitsToFloat(nu == infinity ? 0xffc00000u : 0x7fc00000u);
}

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_ADAM_H_
