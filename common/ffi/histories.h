// jaxfp8_delayed_scales_v3: k histories f32 [g, H], k stored f32 [g] -> k scales, scale_invs, amaxes f32 [g].
//
// k quantizers: their count is that of the buffers. All histories come first, then all of the next operand; results
// likewise. Histories [H] are those of one group.
#ifndef JAXFP8_COMMON_FFI_HISTORIES_H_
#define JAXFP8_COMMON_FFI_HISTORIES_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "common/ffi/checks.h"
#include "common/histories.h"

namespace jaxfp8 {

inline std::vector<int64_t> Dims(ffi::AnyBuffer buffer) {
  return {buffer.dimensions().begin(), buffer.dimensions().end()};
}

// Checks f32 of the shape `dims`, and sets `elements`; `name` is numbered by the quantizer in messages.
template <class T>
ffi::Error ToState(const char* op, const char* name, int64_t quantizer, ffi::AnyBuffer buffer,
                   const std::vector<int64_t>& dims, T** elements) {
  const std::string numbered = std::string(name) + " " + std::to_string(quantizer);
  *elements = Data<float>(buffer);
  return CheckArray({op, numbered.c_str(), buffer}, ffi::DataType::F32, ffi::Span<const int64_t>(dims));
}

// f32 [g, length], or [length], with at least one slot. The history of the first quantizer says which, and how many
// groups all have.
inline ffi::Error CheckHistory(const Operand& operand, ffi::AnyBuffer first, int64_t* groups) {
  JAXFP8_RETURN_IF_ERROR(CheckDtype(operand, {ffi::DataType::F32}));
  std::vector<int64_t> dims = Dims(first);
  const bool is_one_group = dims.size() == 1;
  JAXFP8_RETURN_IF_ERROR(CheckInput(operand, is_one_group ? 1 : 2));
  dims.back() = operand.buffer.dimensions().back();
  if (dims.back() == 0) return Mismatch(operand, "at least one slot");
  *groups = is_one_group ? 1 : dims[0];
  return CheckShape(operand, dims);
}

// Checks the history of a quantizer, and sets its fields.
template <class Quantizer>
ffi::Error ToHistory(const char* op, int64_t quantizer, ffi::AnyBuffer history, ffi::AnyBuffer first, int64_t* groups,
                     Quantizer* to) {
  const std::string numbered = "history " + std::to_string(quantizer);
  JAXFP8_RETURN_IF_ERROR(CheckHistory({op, numbered.c_str(), history}, first, groups));
  to->history = Data<float>(history);
  to->length = history.dimensions().back();
  return ffi::Error::Success();
}

inline ffi::Error CheckQuantizerCount(const char* op, const std::string& wanted, bool matches, int64_t count) {
  if (matches && 1 <= count && count <= kMaxQuantizers) return ffi::Error::Success();
  return ffi::Error::InvalidArgument(std::string(op) + ": expected " + wanted + " for each of 1 to " +
                                     std::to_string(kMaxQuantizers) + " quantizers, got another number");
}

inline ffi::Error ToNumerator(const char* op, int64_t quantizer, float numerator, float* to) {
  const std::string name = "numerator " + std::to_string(quantizer);
  *to = numerator;
  return CheckPositiveNormal(op, name.c_str(), numerator);
}

struct DelayedScalesOp {
  static constexpr char kName[] = "delayed_scales";
  using Params = DelayedScalesParams;

  template <class Binding>
  static auto Bind(Binding context) {
    return std::move(context)
        .RemainingArgs()  // histories, stored
        .RemainingRets()  // scales, scale_invs, amaxes
        .template Attr<ffi::Span<const float>>("numerators")
        .template Attr<bool>("most_recent");
  }

  static ffi::Error ToParams(ffi::RemainingArgs operands, ffi::RemainingRets results,
                             ffi::Span<const float> numerators, bool most_recent, Params* params) {
    const int64_t count = static_cast<int64_t>(numerators.size());
    const bool matches = static_cast<int64_t>(operands.size()) == 2 * count &&
                         static_cast<int64_t>(results.size()) == 3 * count;
    JAXFP8_RETURN_IF_ERROR(CheckQuantizerCount(kName, "2 operands, 3 results and a numerator", matches, count));
    params->count = count;
    params->most_recent = most_recent;
    const auto operand = [&](int64_t i) { return *operands.get<ffi::AnyBuffer>(i); };
    const auto result = [&](int64_t i) { return **results.get<ffi::AnyBuffer>(i); };
    for (int64_t i = 0; i < count; ++i) {
      DelayedScalesQuantizer& to = params->quantizers[i];
      JAXFP8_RETURN_IF_ERROR(ToHistory(kName, i, operand(i), operand(0), &params->groups, &to));
      const std::vector<int64_t> dims = {params->groups};
      JAXFP8_RETURN_IF_ERROR(ToState(kName, "stored", i, operand(count + i), dims, &to.stored));
      JAXFP8_RETURN_IF_ERROR(ToState(kName, "scale", i, result(i), dims, &to.scale));
      JAXFP8_RETURN_IF_ERROR(ToState(kName, "scale_inv", i, result(count + i), dims, &to.scale_inv));
      JAXFP8_RETURN_IF_ERROR(ToState(kName, "amax", i, result(2 * count + i), dims, &to.amax));
      JAXFP8_RETURN_IF_ERROR(ToNumerator(kName, i, numerators.begin()[i], &to.numerator));
    }
    return ffi::Error::Success();
  }
};

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_FFI_HISTORIES_H_
