// The numbers of a reading in buffers of their own, and what is recorded in one.
#ifndef JAXFP8_CPU_KERNELS_READING_NUMBERS_H_
#define JAXFP8_CPU_KERNELS_READING_NUMBERS_H_

#include <cstdint>

#include "common/histories.h"

namespace jaxfp8::cpu {

struct ReadingPart {
  float* data;     // [groups, width]
  int64_t column;  // of its first number in the row of a group
  int64_t width;
};

struct ReadingNumbersParams {
  ReadingPart parts[5 * kMaxQuantizers];
  int64_t count;   // of parts
  float* numbers;  // [groups, stride]
  int64_t groups;
  int64_t stride;
};

// `numbers` is read.
void SplitReading(const ReadingNumbersParams& params);

// The parts are read; numbers without a part become 0.
void JoinRecorded(const ReadingNumbersParams& params);

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_READING_NUMBERS_H_
