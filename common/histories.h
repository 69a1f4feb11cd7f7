// Delayed scaling's state, for several quantizers in one call: what the CPU and CUDA kernels of delayed_scales,
// read_histories and write_histories are given, and their arithmetic, to the bit.
//
// A step reads the state once: delayed_scales gives the scales of a product, read_histories what the products of a loop
// compute their scales from. It writes the state once, by write_histories.
//
// A history [length] has its newest amax in slot 0 and its oldest in slot 1 (with one slot, that is both). Everything
// here is on bits, so that subnormals count on threads that flush them.
#ifndef JAXFP8_COMMON_HISTORIES_H_
#define JAXFP8_COMMON_HISTORIES_H_

#include <cstdint>

#include "common/fp8.h"
#include "common/scale.h"

namespace jaxfp8 {

// All pointers of a call travel as the parameter of one kernel launch, which has room for 4 KiB.
constexpr int kMaxQuantizers = 64;

struct DelayedScalesQuantizer {
  const float* history;  // [groups, length]
  const float* stored;   // [groups], a scale_inv
  float* scale;          // [groups]
  float* scale_inv;      // [groups]
  float* amax;           // [groups], set to 0
  int64_t length;        // at least 1
  float numerator;       // positive and normal
};

struct DelayedScalesParams {
  DelayedScalesQuantizer quantizers[kMaxQuantizers];
  int64_t count;
  int64_t groups;
  bool most_recent;  // the amax is slot 0 and not the largest
};

// A reading says six numbers of each quantizer of a product; in what a step records three of them count.
constexpr int64_t kReadingNumbers = 6;

struct ReadHistoriesQuantizer {
  const float* history;  // [groups, length]
  const float* stored;   // [groups], a scale_inv
  float* reading;        // [groups, stride], from the quantizer's first number on, as WriteReading has them
  int64_t length;        // at least 1
  int64_t stride;        // kReadingNumbers times the quantizers of the product
  float numerator;       // positive and normal
};

struct ReadHistoriesParams {
  ReadHistoriesQuantizer quantizers[kMaxQuantizers];
  int64_t count;
  int64_t groups;
};

struct WriteHistoriesQuantizer {
  const float* history;    // [groups, length]
  const float* amax;       // [groups, stride], of which the first of each row counts; in readings the third too
  const float* scale_inv;  // [groups, stride], as well, the first
  float* next_history;     // [groups, length]; may be `history`
  float* next_scale;       // [groups]
  int64_t length;          // at least 1
  int64_t stride;          // 1; in readings kReadingNumbers times the quantizers of the product
};

struct WriteHistoriesParams {
  WriteHistoriesQuantizer quantizers[kMaxQuantizers];
  int64_t count;
  int64_t groups;
};

static_assert(sizeof(DelayedScalesParams) <= 4096 && sizeof(ReadHistoriesParams) <= 4096 &&
              sizeof(WriteHistoriesParams) <= 4096);

// What is not positive and finite is recorded as 0.
JAXFP8_HD uint32_t CleanBits(float x) {
  const uint32_t bits = FloatToBits(x);
  return IsPositiveFinite(bits) ? bits : 0;
}

// An entry as the maximum of a history counts it: what is below zero, which no step makes, as infinity, which no entry
// is; NaN and infinity as 0.
JAXFP8_HD uint32_t EntryBits(float x) { return IsBelowZero(FloatToBits(x)) ? kInfBits : CleanBits(x); }

// `largest` is the maximum of EntryBits; infinity makes the scale NaN.
JAXFP8_HD ScalePair DelayedScale(uint32_t largest, float stored, float numerator) {
  return AmaxToScale(largest == kInfBits ? -1.0f : BitsToFloat(largest), stored, numerator);
}

// The six numbers of a quantizer. `largest` is as above; the first two are a history of two entries that gives the same
// scales, and -1 in place of an amax makes a scale NaN.
JAXFP8_HD void WriteReading(uint32_t largest, float newest, float stored, float numerator, float* reading) {
  const bool is_state = largest != kInfBits && !IsBelowZero(FloatToBits(stored));
  const ScalePair pair = DelayedScale(largest, stored, numerator);
  reading[0] = is_state ? BitsToFloat(CleanBits(newest)) : -1.0f;
  reading[1] = is_state ? BitsToFloat(largest) : -1.0f;
  reading[2] = stored;
  reading[3] = 0.0f;
  reading[4] = pair.scale;
  reading[5] = pair.scale_inv;
}

// Whether a step used the quantizer: without a use its scale_inv is a zero, of either sign.
JAXFP8_HD bool IsUsed(float scale_inv) { return (FloatToBits(scale_inv) & kAbsMask) != 0; }

// Whether the history stays where it is: the third number that was recorded of its quantizer is not zero. `amax` points
// to the first; without readings (a stride of 1) there is no third.
JAXFP8_HD bool Stays(const float* amax, int64_t stride) {
  return stride > 1 && (FloatToBits(amax[2]) & kAbsMask) != 0;
}

// An entry of a history that stays: what is below zero stays visible.
JAXFP8_HD uint32_t StayingBits(float x) { return IsBelowZero(FloatToBits(x)) ? FloatToBits(x) : CleanBits(x); }

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_HISTORIES_H_
