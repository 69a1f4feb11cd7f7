// What the launchers of both libraries are given: pointers, sizes and formats, without XLA or CUDA types.
//
// histories.h has the parameters of delayed_scales, read_histories and write_histories.
#ifndef JAXFP8_COMMON_PARAMS_H_
#define JAXFP8_COMMON_PARAMS_H_

#include <cstdint>

#include "common/dispatch.h"

namespace jaxfp8 {

struct AmaxParams {
  Dtype dtype;    // of x: bf16, f16 or f32
  const void* x;  // [groups, size]
  float* amax;    // [groups]
  int64_t groups;
  int64_t size;
};

struct AmaxToScaleParams {
  const float* amax;    // [count]
  const float* stored;  // [count]
  float numerator;      // positive and normal
  float* scale;         // [count]
  float* scale_inv;     // [count]
  int64_t count;
};

struct DequantizeParams {
  Dtype format;            // of data: e4m3 or e5m2
  Dtype dtype;             // of out: bf16, f16 or f32
  const void* data;        // [groups, size]
  const float* scale_inv;  // [1] or [groups]
  int64_t scale_stride;    // 0 or 1
  void* out;               // [groups, size]
  int64_t groups;
  int64_t size;
};

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

// How many amaxes `groups` groups have: one together, where the stride is 0.
inline int64_t AmaxCount(int64_t stride, int64_t groups) { return stride == 0 ? 1 : groups; }

struct QuantizeParams {
  Dtype dtype;               // of x: bf16, f16 or f32
  Dtype format;              // of data: e4m3 or e5m2
  const void* x;             // [groups, size]
  const float* scale;        // [1] or [groups]
  int64_t scale_stride;      // 0 or 1
  void* data;                // [groups, size]
  const float* amax_so_far;  // as amax, not negative; or null: 0
  float* amax;               // [1] or [groups]: raised, from what it is so far; may be the same buffer. Null: not wanted
  int64_t amax_stride;       // 0 or 1
  int64_t groups;
  int64_t size;
};

struct TransposeCodesParams {
  const uint8_t* data;  // [groups, m, n]
  uint8_t* data_t;      // [groups, n, m]
  int64_t groups;
  int64_t m;
  int64_t n;
};

// The parameters of an op that quantizes a matrix tile by tile.
struct TileParams {
  Dtype dtype;               // of x: bf16, f16 or f32
  Dtype format;              // of data and data_t: e4m3 or e5m2
  const void* x;             // [groups, m, n], unless the op says otherwise
  const float* scale;        // [1] or [groups]
  int64_t scale_stride;      // 0 or 1
  void* data;                // [groups, m, n]
  void* data_t;              // [groups, n, m], or null: not wanted
  const float* amax_so_far;  // as amax, not negative; or null: 0
  float* amax;               // [1] or [groups]: raised, from what it is so far; may be the same buffer. Null: not wanted
  int64_t amax_stride;       // 0 or 1
  int64_t groups;
  int64_t m;
  int64_t n;
};

struct QuantizeTransposeParams : TileParams {
  float* column_sums;  // null, or [groups, ColumnSumParts(m), n]: the sums of x over 128 rows each
};

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_PARAMS_H_
