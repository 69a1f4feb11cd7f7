// The launchers of split_reading and join_recorded: copies of bits on the calling thread.
#include "cpu/kernels/reading_numbers.h"

#include <algorithm>
#include <cstring>

namespace jaxfp8::cpu {
namespace {

template <class Copy>
void ForEachPart(const ReadingNumbersParams& params, Copy copy) {
  for (int64_t i = 0; i < params.count; ++i) {
    const ReadingPart& part = params.parts[i];
    for (int64_t group = 0; group < params.groups; ++group) {
      copy(part.data + group * part.width, params.numbers + group * params.stride + part.column,
           static_cast<size_t>(part.width) * sizeof(float));
    }
  }
}

}  // namespace

void SplitReading(const ReadingNumbersParams& params) {
  ForEachPart(params, [](float* part, const float* numbers, size_t bytes) { std::memcpy(part, numbers, bytes); });
}

void JoinRecorded(const ReadingNumbersParams& params) {
  std::fill_n(params.numbers, params.groups * params.stride, 0.0f);
  ForEachPart(params, [](const float* part, float* numbers, size_t bytes) { std::memcpy(numbers, part, bytes); });
}

}  // namespace jaxfp8::cpu
