// jaxfp8_split_reading_v1: a reading f32 [g, 6 k] -> k histories f32 [g, 2], k stored, amaxes, scales, scale_invs
//     f32 [g].
// jaxfp8_join_recorded_v1: k amaxes, k scale_invs f32 [g] -> recorded f32 [g, 6 k].
#ifndef JAXFP8_CPU_FFI_READING_NUMBERS_H_
#define JAXFP8_CPU_FFI_READING_NUMBERS_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/ffi/histories.h"
#include "cpu/kernels/reading_numbers.h"

namespace jaxfp8::cpu {

struct PartName {
  const char* name;
  int64_t width;
};

// `parts` are those of a quantizer in the order of its numbers; `get(i)` is a buffer: a part of all quantizers, then
// the next part. params->groups says the groups.
template <int kParts, class Get>
ffi::Error PlaceParts(const char* op, const PartName (&parts)[kParts], int64_t count, Get get,
                      ReadingNumbersParams* params) {
  const int64_t quantizers = count / kParts;
  int64_t column = 0;
  for (const PartName& part : parts) {
    for (int64_t quantizer = 0; quantizer < quantizers; ++quantizer) {
      const ffi::AnyBuffer buffer = get(params->count);
      std::vector<int64_t> dims = {params->groups};
      if (part.width > 1) dims.push_back(part.width);
      float* numbers = nullptr;
      JAXFP8_RETURN_IF_ERROR(ToState(op, part.name, quantizer, buffer, dims, &numbers));
      params->parts[params->count++] = {numbers, kReadingNumbers * quantizer + column, part.width};
    }
    column += part.width;
  }
  return ffi::Error::Success();
}

inline ffi::Error PlaceNumbers(const Operand& numbers, int64_t quantizers, ReadingNumbersParams* params) {
  params->stride = kReadingNumbers * quantizers;
  params->numbers = Data<float>(numbers.buffer);
  return CheckArray(numbers, ffi::DataType::F32, {params->groups, params->stride});
}

struct SplitReadingOp {
  static constexpr char kName[] = "split_reading";
  using Params = ReadingNumbersParams;

  template <class Binding>
  static auto Bind(Binding context) {
    return std::move(context)
        .template Arg<ffi::AnyBuffer>()  // reading
        .RemainingRets()                 // histories, stored, amaxes, scales, scale_invs
        .Attrs();
  }

  static ffi::Error ToParams(ffi::AnyBuffer reading, ffi::RemainingRets results, ffi::Dictionary attributes,
                             Params* params) {
    constexpr PartName kNames[] = {{"history", 2}, {"stored", 1}, {"amax", 1}, {"scale", 1}, {"scale_inv", 1}};
    JAXFP8_RETURN_IF_ERROR(CheckNoAttributes(kName, attributes));
    const int64_t count = static_cast<int64_t>(results.size());
    JAXFP8_RETURN_IF_ERROR(CheckQuantizerCount(kName, "5 results", count % 5 == 0, count / 5));
    const Operand operand{kName, "reading", reading};
    JAXFP8_RETURN_IF_ERROR(CheckInput(operand, 2));
    params->groups = reading.dimensions()[0];
    JAXFP8_RETURN_IF_ERROR(PlaceNumbers(operand, count / 5, params));
    return PlaceParts(kName, kNames, count, [&](int64_t i) { return **results.get<ffi::AnyBuffer>(i); }, params);
  }
};

struct JoinRecordedOp {
  static constexpr char kName[] = "join_recorded";
  using Params = ReadingNumbersParams;

  template <class Binding>
  static auto Bind(Binding context) {
    return std::move(context)
        .RemainingArgs()                 // amaxes, scale_invs
        .template Ret<ffi::AnyBuffer>()  // recorded
        .Attrs();
  }

  static ffi::Error ToParams(ffi::RemainingArgs operands, ffi::Result<ffi::AnyBuffer> recorded,
                             ffi::Dictionary attributes, Params* params) {
    constexpr PartName kNames[] = {{"amax", 1}, {"scale_inv", 1}};
    JAXFP8_RETURN_IF_ERROR(CheckNoAttributes(kName, attributes));
    const int64_t count = static_cast<int64_t>(operands.size());
    JAXFP8_RETURN_IF_ERROR(CheckQuantizerCount(kName, "2 operands", count % 2 == 0, count / 2));
    const auto dims = operands.get<ffi::AnyBuffer>(0)->dimensions();
    params->groups = dims.size() == 0 ? 0 : dims[0];
    JAXFP8_RETURN_IF_ERROR(
        PlaceParts(kName, kNames, count, [&](int64_t i) { return *operands.get<ffi::AnyBuffer>(i); }, params));
    return PlaceNumbers({kName, "recorded", *recorded}, count / 2, params);
  }
};

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_FFI_READING_NUMBERS_H_
