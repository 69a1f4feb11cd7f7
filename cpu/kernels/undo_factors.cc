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

// Whether no cast to bfloat16 explains the difference of a and b.
bool IsFar(float a, float b) { return std::fabs(a - b) > kTolerance * a; }

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

// An entry or a scale as a step reads it, as bits: what is below zero stays.
uint32_t CleanedBits(float x, uint32_t otherwise) {
  const uint32_t bits = FloatToBits(x);
  return IsPositiveFinite(bits) | IsBelowZero(bits) ? bits : otherwise;
}

// What counts of the slots of a tail: the largest bits, and numbers of slots.
struct Tails {
  int32_t old_bits = 0, new_bits = 0;
  int32_t below_zero = 0;
  int32_t not_old = 0, far_from_old = 0;
  int32_t not_rolled = 0, far_from_rolled = 0;

  // Slots whose old entries are `same`, whose entries after a step would be `rolled`, and are `entries`. One loop for
  // each number: of loops with several the compiler makes no vectors.
  void Add(const float* rolled, const float* same, const float* entries, int64_t count) {
    const auto largest = [=](int32_t start, auto bits) {
      for (int64_t i = 0; i < count; ++i) start = bits(i) > start ? bits(i) : start;
      return start;
    };
    const auto number = [=](auto is_counted) {
      int32_t sum = 0;
      for (int64_t i = 0; i < count; ++i) sum += is_counted(i);
      return sum;
    };
    old_bits = largest(old_bits, [=](int64_t i) { return static_cast<int32_t>(FloatToBits(rolled[i])); });
    new_bits = largest(new_bits, [=](int64_t i) { return static_cast<int32_t>(FloatToBits(entries[i]) & kAbsMask); });
    // 0 is in the place of all else with a sign
    below_zero += number([=](int64_t i) { return static_cast<int32_t>(FloatToBits(rolled[i])) < 0; });
    not_old += number([=](int64_t i) { return same[i] != entries[i]; });
    far_from_old += number([=](int64_t i) { return IsFar(same[i], entries[i]); });
    not_rolled += number([=](int64_t i) { return rolled[i] != entries[i]; });
    far_from_rolled += number([=](int64_t i) { return IsFar(rolled[i], entries[i]); });
  }

  float expected() const { return BitsToFloat(below_zero ? kInfBits : static_cast<uint32_t>(old_bits)); }
  float new_tail() const { return BitsToFloat(std::min(static_cast<uint32_t>(new_bits), kInfBits)); }
  int from_old() const { return far_from_old ? 2 : not_old != 0; }
  int from_rolled() const { return far_from_rolled ? 2 : not_rolled != 0; }
};

Tails ReduceTails(const float* history, const float* new_history, int64_t length) {
  constexpr int64_t kChunk = 256;
  float entries[kChunk + 1];
  const auto clean = [&](int64_t first, int64_t count) {
    for (int64_t i = 0; i < count; ++i) entries[i] = BitsToFloat(CleanedBits(history[first + i], 0));
  };
  const int64_t last = length - 1;
  Tails tails;
  for (int64_t slot = 1; slot < last; slot += kChunk) {
    const int64_t count = std::min(kChunk, last - slot);
    clean(slot, count + 1);
    tails.Add(entries + 1, entries, new_history + slot, count);
  }
  if (last > 0) {
    const float newest = BitsToFloat(CleanedBits(history[0], 0));
    clean(last, 1);
    tails.Add(&newest, entries, new_history + last, 1);
  }
  return tails;
}

void UndoFactor(const UndoFactorsParams& params, int64_t group) {
  const float* history = params.history + group * params.length;
  const float* new_history = params.new_history + group * params.length;
  const float old_scale = BitsToFloat(CleanedBits(params.scale[group], FloatToBits(1.0f)));
  const float new_scale = params.new_scale[group], amax = BitsToFloat(CleanBits(new_history[0]));
  const float newest = BitsToFloat(CleanedBits(history[0], 0)), oldest = history[params.length > 1];

  // 1. Reduce the tails.
  const Tails tails = ReduceTails(history, new_history, params.length);
  const float expected = tails.expected(), new_tail = tails.new_tail();
  const uint32_t largest = std::max(FloatToBits(expected), EntryBits(oldest));
  const bool is_below_zero = largest == kInfBits || IsBelowZero(FloatToBits(old_scale));
  const bool is_new = new_tail < BitsToFloat(kInfBits) && std::isfinite(new_history[0]) && std::isfinite(new_scale) &&
                      std::fabs(new_scale) >= kTiny && !is_below_zero;
  const bool is_done = is_new && tails.from_old() < tails.from_rolled() && !IsFar(old_scale, new_scale);
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
