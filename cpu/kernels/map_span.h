// A loop over a span, 64 elements at a time: tails, alignment, the choice of stores.
//
// Included by loops.h, and subject to what it says.
#ifndef JAXFP8_CPU_KERNELS_MAP_SPAN_H_
#define JAXFP8_CPU_KERNELS_MAP_SPAN_H_

#include <cstdint>
#include <cstring>

#include "cpu/kernels/kernel_table.h"

namespace jaxfp8::cpu {
namespace {

constexpr int64_t kBlock = 64;  // elements; as FP8 codes one cache line

// Elements of T before `pointer` reaches a cache line, at most `size`. Never reached by a pointer that is not aligned
// to T; those are not streamed.
template <class T>
int64_t ElementsToLine(const T* pointer, int64_t size) {
  const int64_t bytes = static_cast<int64_t>(-reinterpret_cast<uintptr_t>(pointer) & 63u);
  const int64_t elements = bytes / static_cast<int64_t>(sizeof(T));
  return elements < size ? elements : size;
}

template <class T>
bool CanStream(const T* pointer, Store store) {
  return store == Store::kStreamed && reinterpret_cast<uintptr_t>(pointer) % sizeof(T) == 0;
}

// Applies block(in, out) to [0, size); ragged ends go through a block of zeros. Blocks have two forms: kCached writes
// anywhere, kStreamed needs `out` on a cache line. Whoever streams fences, before others may read. Where `Blocks`
// has no streaming stores, the second form would be the first again: it is left out.
template <class Blocks, class Block, class In, class Out>
void MapSpan(Block& block, const In* in, Out* out, int64_t size, Store store) {
  const auto ragged = [&](int64_t begin, int64_t count) {
    alignas(64) In padded[kBlock] = {};
    alignas(64) Out results[kBlock];
    memcpy(padded, in + begin, count * sizeof(In));
    block.template operator()<Store::kCached>(padded, results);
    memcpy(out + begin, results, count * sizeof(Out));
  };
  int64_t i = 0;
  if (Blocks::kStreams && CanStream(out, store)) {
    i = ElementsToLine(out, size);
    if (i > 0) ragged(0, i);
    for (; i + kBlock <= size; i += kBlock) block.template operator()<Store::kStreamed>(in + i, out + i);
  } else {
    for (; i + kBlock <= size; i += kBlock) block.template operator()<Store::kCached>(in + i, out + i);
  }
  if (i < size) ragged(i, size - i);
}

}  // namespace
}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_MAP_SPAN_H_
