// jaxfp8_read_histories_v3: k histories f32 [g, H], k stored f32 [g] -> a reading f32 [g, 6 q] of each product.
// jaxfp8_write_histories_v5: k histories f32 [g, H], what is recorded: f32 [g, 6 q] of each product, or k amaxes and k
//     scale_invs f32 [g] -> k histories f32 [g, H], k scales f32 [g]; the histories in place where XLA aliases them.
//
// The k quantizers are those of the products, in order: q of each, which the shapes say. Histories [H] are those of one
// group.
#ifndef JAXFP8_COMMON_FFI_READINGS_H_
#define JAXFP8_COMMON_FFI_READINGS_H_

#include <cstdint>
#include <string>
#include <utility>

#include "common/ffi/histories.h"

namespace jaxfp8 {

// Six numbers f32 [g, 6 q] of each of the q quantizers of a product, of which `left` are not placed yet.
inline ffi::Error CheckNumbers(const char* op, const char* name, int64_t product, ffi::AnyBuffer numbers,
                               int64_t groups, int64_t left) {
  const std::string numbered = std::string(name) + " " + std::to_string(product);
  const Operand operand{op, numbered.c_str(), numbers};
  JAXFP8_RETURN_IF_ERROR(CheckDtype(operand, {ffi::DataType::F32}));
  JAXFP8_RETURN_IF_ERROR(CheckInput(operand, 2));
  const int64_t columns = numbers.dimensions()[1];
  const bool is_of_quantizers = columns > 0 && columns % kReadingNumbers == 0 && columns / kReadingNumbers <= left;
  if (is_of_quantizers && numbers.dimensions()[0] == groups) return ffi::Error::Success();
  return Mismatch(operand, "F32[" + std::to_string(groups) + ",6 q], where q adds up to the quantizers");
}

// Calls `place(quantizer, numbers, stride)` for each quantizer, with the first of its numbers; `get(product)` is the
// buffer that has those of a product.
template <class Get, class Place>
ffi::Error PlaceNumbers(const char* op, const char* name, int64_t products, int64_t count, int64_t groups, Get get,
                        Place place) {
  int64_t quantizer = 0;
  for (int64_t product = 0; product < products; ++product) {
    const ffi::AnyBuffer numbers = get(product);
    JAXFP8_RETURN_IF_ERROR(CheckNumbers(op, name, product, numbers, groups, count - quantizer));
    const int64_t stride = numbers.dimensions()[1];
    for (int64_t column = 0; column < stride; column += kReadingNumbers, ++quantizer) {
      place(quantizer, Data<float>(numbers) + column, stride);
    }
  }
  return CheckQuantizerCount(op, std::string("6 numbers of a ") + name, quantizer == count, count);
}

struct ReadHistoriesOp {
  static constexpr char kName[] = "read_histories";
  using Params = ReadHistoriesParams;

  template <class Binding>
  static auto Bind(Binding context) {
    return std::move(context)
        .RemainingArgs()  // histories, stored
        .RemainingRets()  // readings
        .template Attr<ffi::Span<const float>>("numerators");
  }

  static ffi::Error ToParams(ffi::RemainingArgs operands, ffi::RemainingRets results,
                             ffi::Span<const float> numerators, Params* params) {
    const int64_t count = static_cast<int64_t>(numerators.size());
    const bool matches = static_cast<int64_t>(operands.size()) == 2 * count;
    JAXFP8_RETURN_IF_ERROR(CheckQuantizerCount(kName, "2 operands and a numerator", matches, count));
    params->count = count;
    const auto operand = [&](int64_t i) { return *operands.get<ffi::AnyBuffer>(i); };
    for (int64_t i = 0; i < count; ++i) {
      ReadHistoriesQuantizer& to = params->quantizers[i];
      JAXFP8_RETURN_IF_ERROR(ToHistory(kName, i, operand(i), operand(0), &params->groups, &to));
      JAXFP8_RETURN_IF_ERROR(ToState(kName, "stored", i, operand(count + i), {params->groups}, &to.stored));
      JAXFP8_RETURN_IF_ERROR(ToNumerator(kName, i, numerators.begin()[i], &to.numerator));
    }
    return PlaceNumbers(
        kName, "reading", static_cast<int64_t>(results.size()), count, params->groups,
        [&](int64_t product) { return **results.get<ffi::AnyBuffer>(product); },
        [&](int64_t i, float* numbers, int64_t stride) {
          params->quantizers[i].reading = numbers;
          params->quantizers[i].stride = stride;
        });
  }
};

struct WriteHistoriesOp {
  static constexpr char kName[] = "write_histories";
  using Params = WriteHistoriesParams;

  template <class Binding>
  static auto Bind(Binding context) {
    return std::move(context)
        .RemainingArgs()  // histories, recorded
        .RemainingRets()  // histories, scales
        .Attrs();
  }

  static ffi::Error ToParams(ffi::RemainingArgs operands, ffi::RemainingRets results, ffi::Dictionary attributes,
                             Params* params) {
    JAXFP8_RETURN_IF_ERROR(CheckNoAttributes(kName, attributes));
    const int64_t count = static_cast<int64_t>(results.size()) / 2;
    const int64_t products = static_cast<int64_t>(operands.size()) - count;
    const bool matches = results.size() % 2 == 0 && products >= 1;
    JAXFP8_RETURN_IF_ERROR(
        CheckQuantizerCount(kName, "an operand, 6 recorded numbers and 2 results", matches, count));
    params->count = count;
    const auto operand = [&](int64_t i) { return *operands.get<ffi::AnyBuffer>(i); };
    const auto result = [&](int64_t i) { return **results.get<ffi::AnyBuffer>(i); };
    for (int64_t i = 0; i < count; ++i) {
      WriteHistoriesQuantizer& to = params->quantizers[i];
      JAXFP8_RETURN_IF_ERROR(ToHistory(kName, i, operand(i), operand(0), &params->groups, &to));
      JAXFP8_RETURN_IF_ERROR(ToState(kName, "next history", i, result(i), Dims(operand(i)), &to.next_history));
      JAXFP8_RETURN_IF_ERROR(ToState(kName, "next scale", i, result(count + i), {params->groups}, &to.next_scale));
    }
    // A product that is not in a loop gives two numbers of each quantizer, in buffers of their own.
    if (products == 2 * count) {
      for (int64_t i = 0; i < count; ++i) {
        WriteHistoriesQuantizer& to = params->quantizers[i];
        JAXFP8_RETURN_IF_ERROR(ToState(kName, "amax", i, operand(count + i), {params->groups}, &to.amax));
        JAXFP8_RETURN_IF_ERROR(ToState(kName, "scale_inv", i, operand(2 * count + i), {params->groups}, &to.scale_inv));
        to.stride = 1;
      }
      return ffi::Error::Success();
    }
    return PlaceNumbers(
        kName, "recorded", products, count, params->groups,
        [&](int64_t product) { return operand(count + product); },
        [&](int64_t i, const float* numbers, int64_t stride) {
          params->quantizers[i].amax = numbers;
          params->quantizers[i].scale_inv = numbers + 1;
          params->quantizers[i].stride = stride;
        });
  }
};

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_FFI_READINGS_H_
