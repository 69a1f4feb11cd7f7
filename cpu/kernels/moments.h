// Moments of an optimizer in FP8: blocks of 128 elements of a row, each with codes, an amax and an exponent
// (jaxfp8/ops/_moments.py has the definition).
//
// decode gives the f32 elements. encode quantizes `after`; blocks that decode to `after` already keep their bits.
#ifndef JAXFP8_CPU_KERNELS_MOMENTS_H_
#define JAXFP8_CPU_KERNELS_MOMENTS_H_

#include <cstdint>

#include "cpu/kernels/task_pool.h"

namespace jaxfp8::cpu {

constexpr int64_t kMomentBlock = 128;  // elements; the last block of a row may have fewer

struct DecodeMomentParams {
  const uint8_t* data;     // e4m3 [rows, n]
  const float* amax;       // [rows, ceil(n / 128)]
  const int8_t* exponent;  // [rows, ceil(n / 128)]
  float* out;              // [rows, n]
  int64_t rows;
  int64_t n;
};

// The results may be the buffers of the moment itself.
struct EncodeMomentParams {
  const uint8_t* data;     // e4m3 [rows, n]
  const float* amax;       // [rows, ceil(n / 128)]
  const int8_t* exponent;  // [rows, ceil(n / 128)]
  const float* after;      // [rows, n]
  const uint32_t* keys;    // of the random bits [rows, ceil(n / 128)], or null: to nearest
  bool squared;            // zero stands for zero alone, and spans are those of squares
  uint8_t* next_data;      // e4m3 [rows, n]
  float* next_amax;        // [rows, ceil(n / 128)]
  int8_t* next_exponent;   // [rows, ceil(n / 128)]
  int64_t rows;
  int64_t n;
};

void DecodeMoment(TaskPool& pool, const DecodeMomentParams& params);
void EncodeMoment(TaskPool& pool, const EncodeMomentParams& params);

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_MOMENTS_H_
