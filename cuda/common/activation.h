// The activation functions, of f32 in registers.
//
//   silu(x) = x * s(x),  gelu(x) = x * s(z(x)),  s(z) = 1 / (1 + exp(-z)),  z(x) = 2 sqrt(2 / pi) (x + 0.044715 x^3)
//   relu_squared(x) = max(x, 0)^2
//   clamped_swiglu(x, y) = g * s(alpha g) * (u + offset),  g = min(x, limit),  u = min(max(y, -limit), limit)
//
// gelu in this form is the tanh approximation without its cancellation where tanh is close to -1.
//
// Accuracy, with u = 2^-24. The exponent of 2 has a relative error of 5u (of two roundings of constants, a square, a
// sum and a product), which is |z| 5u relative in exp(-z); ex2.approx adds 4u. Of these s gets the share
// exp(-z) / (1 + exp(-z)) = s(-z). The sum, rcp.approx and the product add u, 2u and u:
//
//   |error| <= |result| (s(-z) (5 |z| + 4) + 4) u
//
// below 6u where the result matters, growing with |z| in the tail where it goes to zero. There exp(-z) overflows from
// z = -88 on and the result is a zero; it would have been below 2^-119.
//
// With z = alpha g the exponent has two roundings, of -alpha log2(e) and of its product with g, fewer than 5. There the
// result that is lost is below 2^-119 / alpha times u + offset, whose sum is one more u. A square is one u.
//
// Their gradients, of g times a gate's factor u, in the order of operations of JAX's derivative:
//
//   d/dx = (g u) s + ((g u) x) (s (1 - s)) z',   d/du = (g x) s
//
// with 1 - s = exp(-z) s, where nothing cancels: where s is next to 1, x z' can be large. exp(-z) is cut at 2^127, above
// which it would become infinite. There s is 0, whatever the errors of ex2.approx and rcp.approx are: at 2^126 it would
// be 2^-126 for every x that is far below zero, and x z' can be larger than 2^126.
//
// The gradient of relu_squared is g x + g x, one u. Those of clamped_swiglu are the gradients above at g and u + offset,
// with z' = alpha; beyond a limit they are 0. At the limit the derivative is 1, as in torch.
#ifndef JAXFP8_CUDA_COMMON_ACTIVATION_H_
#define JAXFP8_CUDA_COMMON_ACTIVATION_H_

#include <cstdint>

#include <cuda_runtime.h>

#include "cuda/common/activations.h"
#include "cuda/common/ptx.h"

namespace jaxfp8::cuda {

constexpr double kLog2E = 1.4426950408889634;
constexpr double kGelu = 1.5957691216057308;  // 2 sqrt(2 / pi)

// x * s(z(x)); Function says what -z log2(e) and the derivative z' are.
template <class Function>
struct TimesSigmoid {
  __device__ __forceinline__ float Of(float x) const {
    return __fmul_rn(x, Reciprocal(__fadd_rn(1.0f, Exp2(Self().Exponent(x)))));
  }
  // The gradient of Of(x) u, whose gradient is g: with respect to u, or else x. `g_u` is g where that is wanted for u,
  // g u otherwise.
  __device__ __forceinline__ float Gradient(float g_u, float x, bool for_u) const {
    const float exponent = Self().Exponent(x);
    const float e = Exp2(exponent < 127.0f ? exponent : 127.0f);
    const float s = Reciprocal(__fadd_rn(1.0f, e)), g_u_x = __fmul_rn(g_u, x);
    const float through_s = __fmul_rn(__fmul_rn(g_u_x, __fmul_rn(s, __fmul_rn(e, s))), Self().Slope(x));
    return for_u ? __fmul_rn(g_u_x, s) : __fmaf_rn(g_u, s, through_s);
  }

 private:
  __device__ __forceinline__ const Function& Self() const { return static_cast<const Function&>(*this); }
};

struct Silu : TimesSigmoid<Silu> {
  __device__ __forceinline__ static float Exponent(float x) { return __fmul_rn(x, static_cast<float>(-kLog2E)); }
  __device__ __forceinline__ static float Slope(float) { return 1.0f; }
};

// x * s(alpha x).
struct ScaledSilu : TimesSigmoid<ScaledSilu> {
  float alpha, minus_alpha_log2e;

  __device__ __forceinline__ float Exponent(float x) const { return __fmul_rn(x, minus_alpha_log2e); }
  __device__ __forceinline__ float Slope(float) const { return alpha; }
};

struct Gelu : TimesSigmoid<Gelu> {
  __device__ __forceinline__ static float Exponent(float x) {
    constexpr float kLinear = static_cast<float>(-kLog2E * kGelu);
    constexpr float kCubic = static_cast<float>(-kLog2E * kGelu * 0.044715);
    return __fmul_rn(x, __fmaf_rn(__fmul_rn(x, x), kCubic, kLinear));
  }
  __device__ __forceinline__ static float Slope(float x) {
    return __fmaf_rn(__fmul_rn(x, x), static_cast<float>(3 * kGelu * 0.044715), static_cast<float>(kGelu));
  }
};

struct Relu {
  __device__ __forceinline__ static float Of(float x) { return x <= 0.0f ? 0.0f : x; }  // NaN stays
  __device__ __forceinline__ static float Gradient(float g, float x, bool) { return x <= 0.0f ? 0.0f : g; }
};

struct ReluSquared {
  __device__ __forceinline__ static float Of(float x) {
    const float r = Relu::Of(x);
    return __fmul_rn(r, r);
  }
  __device__ __forceinline__ static float Gradient(float g, float x, bool) {
    const float g_x = __fmul_rn(g, x);
    return x <= 0.0f ? 0.0f : __fadd_rn(g_x, g_x);
  }
};

// What a kernel is given: how many values make one, and which function.
template <class Function>
struct Plain {
  static constexpr int kInputs = 1;
  __device__ __forceinline__ static float Of(const float (&x)[1]) { return Function{}.Of(x[0]); }
  __device__ __forceinline__ static float Gradient(float g, const float (&x)[1], int) {
    return Function{}.Gradient(g, x[0], false);
  }
};

template <class Function>
struct Gated {
  static constexpr int kInputs = 2;
  __device__ __forceinline__ static float Of(const float (&x)[2]) { return __fmul_rn(Function{}.Of(x[0]), x[1]); }
  // With respect to x[part].
  __device__ __forceinline__ static float Gradient(float g, const float (&x)[2], int part) {
    return Function{}.Gradient(part == 0 ? __fmul_rn(g, x[1]) : g, x[0], part != 0);
  }
};

struct ClampedSwiGlu {
  static constexpr int kInputs = 2;
  ScaledSilu silu;
  float limit, offset;

  __device__ __forceinline__ float Of(const float (&x)[2]) const {
    return __fmul_rn(silu.Of(Smaller(x[0], limit)), __fadd_rn(Clamped(x[1]), offset));
  }
  __device__ __forceinline__ float Gradient(float g, const float (&x)[2], int part) const {
    const float gate = Smaller(x[0], limit), up = Clamped(x[1]);
    const float g_u = part == 0 ? __fmul_rn(g, __fadd_rn(up, offset)) : g;
    const float gradient = silu.Gradient(g_u, gate, part != 0);
    const float clamped = part == 0 ? gate : up, given = part == 0 ? x[0] : x[1];
    return fabsf(clamped) < fabsf(given) ? 0.0f : gradient;  // beyond the limit; a NaN is not
  }

 private:
  __device__ __forceinline__ float Clamped(float u) const { return Larger(Smaller(u, limit), -limit); }
};

// Calls `visit` with what a kernel is given.
template <class Visitor>
cudaError_t DispatchActivation(Activation activation, const ClampParams& clamp, Visitor&& visit) {
  switch (activation) {
    case Activation::kGelu: return visit(Plain<Gelu>{});
    case Activation::kSilu: return visit(Plain<Silu>{});
    case Activation::kRelu: return visit(Plain<Relu>{});
    case Activation::kSiluGated: return visit(Gated<Silu>{});
    case Activation::kGeluGated: return visit(Gated<Gelu>{});
    case Activation::kReluSquared: return visit(Plain<ReluSquared>{});
    case Activation::kClampedSwiGlu: {
      const ScaledSilu silu = {{}, clamp.alpha, static_cast<float>(-kLog2E * clamp.alpha)};
      return visit(ClampedSwiGlu{silu, clamp.limit, clamp.offset});
    }
  }
  return cudaErrorInvalidValue;
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_COMMON_ACTIVATION_H_
