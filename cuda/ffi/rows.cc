// jaxfp8_read_rows_v1: k histories f32 [n, H], k stored f32 [n] -> a scale, a scale_inv and an amax f32 [1] of each row
//     of each quantizer.
// jaxfp8_write_rows_v1: k histories f32 [n, H], an amax and a scale_inv f32 [1] of each row of each quantizer ->
//     k histories f32 [n, H], k scales f32 [n].
//
// What delayed_scales and write_histories do for n products whose histories are rows of the same arrays. Each number is
// in a buffer of its own, so that XLA takes none out of an array. All scales, in the order of quantizers and then of
// rows, come before all scale_invs.
#include <array>
#include <cstdint>
#include <string>

#include "common/ffi/histories.h"
#include "cuda/ffi/support.h"
#include "cuda/kernels/delayed_scales.h"
#include "cuda/kernels/write_histories.h"

namespace jaxfp8::cuda {
namespace {

// `get(i)` is the i-th of the buffers of one number: as many of each name.
template <size_t kNames, class Get>
ffi::Error CheckNumbers(const char* op, const std::array<const char*, kNames>& names, int64_t count, int64_t of_each,
                        Get get) {
  const int64_t expected = static_cast<int64_t>(kNames) * of_each;
  if (count != expected) {
    return ffi::Error::InvalidArgument(std::string(op) + ": expected " + std::to_string(expected) +
                                       " numbers of quantizers and rows, got " + std::to_string(count));
  }
  for (int64_t i = 0; i < count; ++i) {
    const std::string numbered = std::string(names[i / of_each]) + " " + std::to_string(i % of_each);
    JAXFP8_RETURN_IF_ERROR(CheckArray({op, numbered.c_str(), get(i)}, ffi::DataType::F32, {1}));
  }
  return ffi::Error::Success();
}

// `whole` has the arrays of the quantizers; `place(i, row, quantizer)` fills in the i-th row of all quantizers' rows, but
// its history. A launch has room for kMaxQuantizers.
template <class Params, class Place, class Launch>
ffi::Error LaunchRows(const char* op, const Params& whole, Place place, Launch launch) {
  Params params = {};
  params.groups = 1;
  for (int64_t i = 0; i < whole.count * whole.groups; ++i) {
    const int64_t row = i % whole.groups;
    auto& quantizer = params.quantizers[params.count++] = whole.quantizers[i / whole.groups];
    quantizer.history += row * quantizer.length;
    place(i, row, &quantizer);
    if (params.count == kMaxQuantizers) {
      JAXFP8_RETURN_IF_ERROR(ToError(op, launch(params)));
      params.count = 0;
    }
  }
  return ToError(op, launch(params));
}

ffi::Error ReadRowsHandler(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                           ffi::Span<const float> numerators) {
  constexpr char kOp[] = "read_rows";
  const int64_t count = static_cast<int64_t>(numerators.size());
  const bool matches = static_cast<int64_t>(operands.size()) == 2 * count;
  JAXFP8_RETURN_IF_ERROR(CheckQuantizerCount(kOp, "2 operands and a numerator", matches, count));
  const auto operand = [&](int64_t i) { return *operands.get<ffi::AnyBuffer>(i); };
  const auto result = [&](int64_t i) { return **results.get<ffi::AnyBuffer>(i); };
  JAXFP8_RETURN_IF_ERROR(CheckRank({kOp, "history 0", operand(0)}, 2));
  DelayedScalesParams whole = {};
  whole.count = count;
  for (int64_t q = 0; q < count; ++q) {
    DelayedScalesQuantizer& to = whole.quantizers[q];
    JAXFP8_RETURN_IF_ERROR(ToHistory(kOp, q, operand(q), operand(0), &whole.groups, &to));
    JAXFP8_RETURN_IF_ERROR(ToState(kOp, "stored", q, operand(count + q), {whole.groups}, &to.stored));
    JAXFP8_RETURN_IF_ERROR(ToNumerator(kOp, q, numerators.begin()[q], &to.numerator));
  }
  const int64_t of_each = count * whole.groups;
  JAXFP8_RETURN_IF_ERROR(CheckNumbers<3>(kOp, {"scale", "scale_inv", "amax"}, static_cast<int64_t>(results.size()),
                                         of_each, result));
  return LaunchRows(
      kOp, whole,
      [&](int64_t i, int64_t row, DelayedScalesQuantizer* quantizer) {
        quantizer->stored += row;
        quantizer->scale = Data<float>(result(i));
        quantizer->scale_inv = Data<float>(result(of_each + i));
        quantizer->amax = Data<float>(result(2 * of_each + i));
      },
      [&](const DelayedScalesParams& params) { return LaunchDelayedScales(params, stream); });
}

ffi::Error WriteRowsHandler(cudaStream_t stream, ffi::RemainingArgs operands, ffi::RemainingRets results,
                            ffi::Dictionary attributes) {
  constexpr char kOp[] = "write_rows";
  JAXFP8_RETURN_IF_ERROR(CheckNoAttributes(kOp, attributes));
  const int64_t count = static_cast<int64_t>(results.size()) / 2;
  const int64_t numbers = static_cast<int64_t>(operands.size()) - count;
  const bool matches = results.size() % 2 == 0 && numbers >= 0;
  JAXFP8_RETURN_IF_ERROR(CheckQuantizerCount(kOp, "an operand and 2 results", matches, count));
  const auto operand = [&](int64_t i) { return *operands.get<ffi::AnyBuffer>(i); };
  const auto result = [&](int64_t i) { return **results.get<ffi::AnyBuffer>(i); };
  JAXFP8_RETURN_IF_ERROR(CheckRank({kOp, "history 0", operand(0)}, 2));
  WriteHistoriesParams whole = {};
  whole.count = count;
  for (int64_t q = 0; q < count; ++q) {
    WriteHistoriesQuantizer& to = whole.quantizers[q];
    JAXFP8_RETURN_IF_ERROR(ToHistory(kOp, q, operand(q), operand(0), &whole.groups, &to));
    JAXFP8_RETURN_IF_ERROR(ToState(kOp, "next history", q, result(q), Dims(operand(q)), &to.next_history));
    JAXFP8_RETURN_IF_ERROR(ToState(kOp, "next scale", q, result(count + q), {whole.groups}, &to.next_scale));
    to.stride = 1;
  }
  const int64_t of_each = count * whole.groups;
  const auto number = [&](int64_t i) { return operand(count + i); };
  JAXFP8_RETURN_IF_ERROR(CheckNumbers<2>(kOp, {"amax", "scale_inv"}, numbers, of_each, number));
  return LaunchRows(
      kOp, whole,
      [&](int64_t i, int64_t row, WriteHistoriesQuantizer* quantizer) {
        quantizer->amax = Data<float>(number(i));
        quantizer->scale_inv = Data<float>(number(of_each + i));
        quantizer->next_history += row * quantizer->length;
        quantizer->next_scale += row;
      },
      [&](const WriteHistoriesParams& params) { return LaunchWriteHistories(params, stream); });
}

}  // namespace
}  // namespace jaxfp8::cuda

JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_read_rows_v1, jaxfp8::cuda::ReadRowsHandler,
                             jaxfp8::cuda::OnStream()
                                 .RemainingArgs()  // histories, stored
                                 .RemainingRets()  // scales, scale_invs, amaxes
                                 .Attr<xla::ffi::Span<const float>>("numerators"),
                             {jaxfp8::cuda::kRecordable});

JAXFP8_DEFINE_HANDLER_SYMBOL(jaxfp8_write_rows_v1, jaxfp8::cuda::WriteRowsHandler,
                             jaxfp8::cuda::OnStream()
                                 .RemainingArgs()  // histories, amaxes, scale_invs
                                 .RemainingRets()  // histories, scales
                                 .Attrs(),
                             {jaxfp8::cuda::kRecordable});
