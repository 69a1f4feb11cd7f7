// From a run-time dtype to a compile-time type, once: visitors that call a generic lambda with a type tag.
//
//   DispatchFp8(dtype, [&](auto format) { using Format = typename decltype(format)::type; ... });
//
// The handlers check dtypes first (checks.h), so a visitor that meets another one returns false and calls nothing.
// No XLA types here: kernels and launchers use these enums.
#ifndef JAXFP8_COMMON_DISPATCH_H_
#define JAXFP8_COMMON_DISPATCH_H_

#include <cstdint>

#include "common/fp8.h"

namespace jaxfp8 {

enum class Dtype : int32_t { kBF16, kF16, kF32, kE4M3, kE5M2 };

template <class T>
struct TypeTag {
  using type = T;
};

// Storage of the high-precision formats. The kernels widen them to float themselves.
struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
using F32 = float;

template <class Visitor>
bool DispatchHighPrecision(Dtype dtype, Visitor&& visit) {
  switch (dtype) {
    case Dtype::kBF16: visit(TypeTag<BF16>{}); return true;
    case Dtype::kF16: visit(TypeTag<F16>{}); return true;
    case Dtype::kF32: visit(TypeTag<F32>{}); return true;
    default: return false;
  }
}

template <class Visitor>
bool DispatchFp8(Dtype dtype, Visitor&& visit) {
  switch (dtype) {
    case Dtype::kE4M3: visit(TypeTag<E4M3>{}); return true;
    case Dtype::kE5M2: visit(TypeTag<E5M2>{}); return true;
    default: return false;
  }
}

inline int64_t ByteWidth(Dtype dtype) {
  switch (dtype) {
    case Dtype::kF32: return 4;
    case Dtype::kBF16:
    case Dtype::kF16: return 2;
    default: return 1;
  }
}

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_DISPATCH_H_
