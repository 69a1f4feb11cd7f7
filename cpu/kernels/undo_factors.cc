// The undo_factors launcher: a loop on the calling thread, with the arithmetic of XLA's threads, which flush subnormals.
#include "cpu/kernels/undo_factors.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "common/histories.h"
#include "cpu/kernels/float_env.h"

namespace jaxfp8::cpu {
namespace {

constexpr float kTolerance = 0.01f;
constexpr float kRoot = 1.41421356237309515f;
constexpr float kTiny = std::numeric_limits<float>::min();
constexpr float kMax = std::numeric_limits<float>::max();

// 0 if a and b are equal, 1 if a cast to bfloat16 may explain their difference, else 2.
int32_t Difference(float a, float b) { return std::fabs(a - b) > kTolerance * a ? 2 : a != b; }

bool IsPowerOfTwo(float x, double tolerance) {
  const float significand = BitsToFloat((FloatToBits(x) & 0x007fffffu) | 0x3f800000u);
  const bool is_near =
      significand <= static_cast<float>(1 + tolerance) || significand >= static_cast<float>(2 / (1 + tolerance));
  return is_near && x >= kTiny && std::isfinite(x);
}

bool IsPowerOfTwoOrSum(float factor) {
  const bool is_sum = factor > 1.5f && std::fabs(factor - std::nearbyint(factor)) <= kTolerance * factor;
  return is_sum || IsPowerOfTwo(factor, 0.01);
}

float FactorOfScale(float old_scale, float new_scale, float amax) {
  const float size = std::fabs(new_scale), ratio = amax / (7 * size);
  const bool is_current =
      IsPowerOfTwo(ratio, 5e-5) || IsPowerOfTwo(kRoot * ratio, 5e-5) || size <= BitsToFloat(kMinScaleBits);
  return is_current ? 1.0f : new_scale / old_scale;
}

// An entry or a scale as a step reads it: what is below zero stays.
float Cleaned(float x, float otherwise) {
  const uint32_t bits = FloatToBits(x);
  return IsPositiveFinite(bits) || IsBelowZero(bits) ? x : otherwise;
}

struct Tails {
  uint32_t expected = 0, tail = 0;  // the largest entry of the old tail and of the new one, as bits
  int32_t from_old = 0, from_rolled = 0;

  void Add(float rolled, float same, float entry) {
    expected = std::max(expected, EntryBits(rolled));
    tail = std::max(tail, std::min(FloatToBits(entry) & kAbsMask, kInfBits));
    from_old = std::max(from_old, Difference(same, entry));
    from_rolled = std::max(from_rolled, Difference(rolled, entry));
  }
};

void UndoFactor(const UndoFactorsParams& params, int64_t group) {
  const float* history = params.history + group * params.length;
  const float* new_history = params.new_history + group * params.length;
  const auto entry = [&](int64_t slot) { return Cleaned(history[slot], 0.0f); };
  const float old_scale = Cleaned(params.scale[group], 1.0f), new_scale = params.new_scale[group];
  const float newest = entry(0), amax = BitsToFloat(CleanBits(new_history[0]));
  const int64_t last = params.length - 1;

  // 1. Reduce the tails.
  Tails tails;
  for (int64_t slot = 1; slot < last; ++slot) tails.Add(entry(slot + 1), entry(slot), new_history[slot]);
  if (last > 0) tails.Add(newest, entry(last), new_history[last]);
  const uint32_t largest = std::max(tails.expected, EntryBits(last > 0 ? entry(1) : newest));
  const bool is_below_zero = largest == kInfBits || IsBelowZero(FloatToBits(old_scale));
  const float expected = BitsToFloat(tails.expected), new_tail = BitsToFloat(tails.tail);
  const bool is_new = tails.tail != kInfBits && std::isfinite(new_history[0]) && std::isfinite(new_scale) &&
                      std::fabs(new_scale) >= kTiny && !is_below_zero;
  const bool is_done = is_new && tails.from_old < tails.from_rolled && Difference(old_scale, new_scale) < 2;
  const bool touched = is_new && !is_done;

  // 2. Find the factor.
  float factor = 1.0f;
  if (touched && expected >= kTiny) {
    factor = std::copysign(1.0f, new_scale) * new_tail / std::max(expected, kTiny);
  } else if (touched && largest == 0) {
    factor = FactorOfScale(old_scale, new_scale, amax);
  }

  // 3. Undo it.
  const bool is_unscaled = std::fabs(factor - 1) <= kTolerance;
  const bool usable = touched && (is_unscaled || IsPowerOfTwoOrSum(factor));
  const float divisor = usable && !is_unscaled ? factor : 1.0f;
  float recorded = divisor < 1 ? std::min(amax / divisor, kMax) : amax;
  float scale = is_unscaled ? new_scale : new_scale / divisor;
  if (!usable || !IsPositiveFinite(FloatToBits(scale))) scale = old_scale;
  if (touched && !usable) scale = -std::fabs(old_scale);
  if (!usable) recorded = is_done ? std::max(newest, amax) : newest;

  params.amax[group] = recorded;
  params.scale_inv[group] = scale;
  params.stays[group] = usable ? 0.0f : 1.0f;
  params.factor[group] = is_below_zero ? BitsToFloat(0x7fc00000u) : factor;
}

// Through a pointer that the compiler does not see through, as float_env.h asks.
void (*volatile const kUndoFactor)(const UndoFactorsParams&, int64_t) = UndoFactor;

}  // namespace

void UndoFactors(const UndoFactorsParams& params) {
  const ScopedFlush flush;
  for (int64_t group = 0; group < params.groups; ++group) kUndoFactor(params, group);
}

}  // namespace jaxfp8::cpu
