// Runs an operation over registers for every lane, and says which bits of its result are undefined.
#ifndef JAXFP8_TESTS_CUDA_PTX_LANES_H_
#define JAXFP8_TESTS_CUDA_PTX_LANES_H_

#include <array>
#include <cstdint>

#include "warp.h"

namespace ptx {

// Three operands, or the undefined bits of three. Operands that an instruction does not have are 0.
struct Operands {
  uint64_t a, b, c;
  uint64_t Any() const { return a | b | c; }
};

// The undefined bits of a result, of operands and their undefined bits.
using UndefinedRule = uint64_t (*)(const Operands& values, const Operands& undefined);

// `kValue(a, b, c)` for each lane. Undefined bits are looked at only where there are some.
template <auto kValue, UndefinedRule kRule>
void Each(Warp& warp, const Instruction& in, uint32_t lanes) {
  const Register &a = warp.at(in.from[0]), &b = warp.at(in.from[1]), &c = warp.at(in.from[2]);
  const int result = in.to[0];
  if (result < 0) return;
  Register& to = warp.at(result);
  const uint32_t lanes_to_check = (a.undefined_lanes | b.undefined_lanes | c.undefined_lanes) & lanes;
  std::array<uint64_t, kLanes> undefined;
  ForLanes(lanes_to_check, [&](int i) {
    undefined[i] = kRule({a.value[i], b.value[i], c.value[i]}, {a.Undefined(i), b.Undefined(i), c.Undefined(i)});
  });
  if (lanes == ~0u) {
    for (int i = 0; i < kLanes; ++i) to.value[i] = kValue(a.value[i], b.value[i], c.value[i]);
  } else {
    ForLanes(lanes, [&](int i) { to.value[i] = kValue(a.value[i], b.value[i], c.value[i]); });
  }
  to.undefined_lanes &= ~lanes;
  ForLanes(lanes_to_check, [&](int i) {
    to.undefined[i] = undefined[i];
    to.undefined_lanes |= static_cast<uint32_t>(undefined[i] != 0) << i;
  });
}

// ----------------------------------------------------------------------------------------- which bits are undefined
template <class T>
constexpr uint64_t kAllBits = static_cast<uint64_t>(static_cast<T>(~T{0}));

// All bits of the result, as soon as one bit of an operand is.
template <class T>
uint64_t Whole(const Operands&, const Operands& undefined) {
  return (undefined.Any() & kAllBits<T>) != 0 ? kAllBits<T> : 0;
}
// The one bit of a predicate, as soon as one bit of an operand of type T is.
template <class T>
uint64_t Predicate(const Operands&, const Operands& undefined) {
  return (undefined.Any() & kAllBits<T>) != 0;
}
// Sums and products: the lowest undefined bit of an operand and all above it.
template <class T>
uint64_t Carried(const Operands&, const Operands& undefined) {
  const uint64_t any = undefined.Any() & kAllBits<T>;
  return any == 0 ? 0 : (~(any & (~any + 1)) + 1) & kAllBits<T>;
}
// The same bits of the operand.
template <class T>
uint64_t Same(const Operands&, const Operands& undefined) {
  return undefined.Any() & kAllBits<T>;
}
// A 0 of the other operand decides.
inline uint64_t OfAnd(const Operands& values, const Operands& undefined) {
  return (undefined.a & (values.b | undefined.b)) | (undefined.b & (values.a | undefined.a));
}
// A 1 of the other operand decides.
inline uint64_t OfOr(const Operands& values, const Operands& undefined) {
  return (undefined.a & (~values.b | undefined.b)) | (undefined.b & (~values.a | undefined.a));
}
// The operand that the predicate c chooses.
template <class T>
uint64_t Selected(const Operands& values, const Operands& undefined) {
  if (undefined.c & 1) return kAllBits<T>;
  return (values.c & 1 ? undefined.a : undefined.b) & kAllBits<T>;
}
// Packed pairs of one operand after the other.
inline uint64_t OfHalves(const Operands&, const Operands& undefined) {
  const uint64_t any = undefined.Any();
  return (any & 0xffff ? 0xffffu : 0u) | (any & 0xffff0000 ? 0xffff0000u : 0u);
}
// Two operands packed to one result of 2 x kBits, the first in the upper part.
template <int kBits>
uint64_t OfPacked(const Operands&, const Operands& undefined) {
  constexpr uint64_t kPart = (uint64_t{1} << kBits) - 1;
  return (undefined.a ? kPart << kBits : 0) | (undefined.b ? kPart : 0);
}

}  // namespace ptx

#endif  // JAXFP8_TESTS_CUDA_PTX_LANES_H_
