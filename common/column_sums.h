// How quantize_transpose sums columns: a partial sum for every 128 rows, which whoever calls it adds up.
//
// A part belongs to one tile of rows, so that no two threads or blocks add to the same number: the same input gives the
// same bytes on every run.
#ifndef JAXFP8_COMMON_COLUMN_SUMS_H_
#define JAXFP8_COMMON_COLUMN_SUMS_H_

#include <cstdint>

#include "common/fp8.h"

namespace jaxfp8 {

constexpr int64_t kColumnSumRows = 128;

JAXFP8_HD constexpr int64_t ColumnSumParts(int64_t rows) {
  return rows / kColumnSumRows + (rows % kColumnSumRows != 0);
}

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_COLUMN_SUMS_H_
