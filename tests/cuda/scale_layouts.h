// Where cuBLASLt's manual says that the scale of an element is: section "Narrow precision data types usage".
#ifndef JAXFP8_TESTS_CUDA_SCALE_LAYOUTS_H_
#define JAXFP8_TESTS_CUDA_SCALE_LAYOUTS_H_

#include <cmath>
#include <cstdint>

// The scale of element (outer, inner) of an operand with `outer_size` rows (columns, for B) and `inner_size` elements
// along K, in blocks of `rows` by `columns`: (0, 0) one for all, (1, 0) one for each row, (1, 32), (1, 128), (128, 128).
inline float ScaleAt(const void* scales, int rows, int columns, int64_t outer, int64_t inner, int64_t outer_size,
                     int64_t inner_size) {
  const float* const f32 = static_cast<const float*>(scales);
  if (columns == 0) return f32[rows == 0 ? 0 : outer];
  const int64_t block = inner / columns;
  const int64_t blocks = (inner_size + columns - 1) / columns;
  if (columns == 128 && rows == 1) return f32[block * outer_size + outer];
  if (columns == 128) return f32[outer / 128 * ((blocks + 3) / 4 * 4) + block];
  const int64_t sf_outer = outer / 128 * 128;
  const int64_t sf_inner = block / 4 * 4;
  const int64_t sf_inner_dim = (blocks + 3) / 4 * 4;
  const int64_t tile = (sf_inner + sf_outer * sf_inner_dim / 128) * 128;
  const int64_t offset = outer % 32 * 16 + outer % 128 / 32 * 4 + block % 4;
  const uint8_t code = static_cast<const uint8_t*>(scales)[tile + offset];
  return code == 255 ? NAN : std::ldexp(1.0f, code - 127);
}

#endif  // JAXFP8_TESTS_CUDA_SCALE_LAYOUTS_H_
