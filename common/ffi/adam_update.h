// jaxfp8_adam_update_v1: of 1 to 16 leaves, one after the other, grads f32 [g, n]; with `apply` params f32 [g, n]; the
// two moments, each data e4m3 [g, n], amax f32 [g, ceil(n / 128)] and exponent s8 of the shape of amax; hyper f32 [h, 11],
// of which each row is for g / h rows; then of all leaves the keys of both moments, u32 [2 g ceil(n / 128) + ...]
// -> of each leaf out f32 [g, n]; data, amax and exponent of the moments.
#ifndef JAXFP8_COMMON_FFI_ADAM_UPDATE_H_
#define JAXFP8_COMMON_FFI_ADAM_UPDATE_H_

#include <cstdint>
#include <string>
#include <utility>

#include "common/adam.h"
#include "common/ffi/checks.h"
#include "common/ffi/encode_moment.h"

namespace jaxfp8 {

struct AdamUpdateOp {
  static constexpr char kName[] = "adam_update";
  using Params = AdamUpdateParams;

  template <class Binding>
  static auto Bind(Binding context) {
    return std::move(context)
        .RemainingArgs()  // of each leaf grads, params with `apply`, two moments, hyper; keys
        .RemainingRets()  // of each leaf out, two moments
        .template Attr<bool>("apply");
  }

  static ffi::Error ToParams(ffi::RemainingArgs operands, ffi::RemainingRets results, bool apply, Params* params) {
    const int64_t of_leaf = apply ? 9 : 8, count = static_cast<int64_t>(results.size()) / kResults;
    if (count < 1 || count > kMaxLeaves || static_cast<int64_t>(results.size()) != count * kResults ||
        static_cast<int64_t>(operands.size()) != count * of_leaf + 1) {
      return ffi::Error::InvalidArgument(
          std::string(kName) + ": expected " + std::to_string(of_leaf) + " operands and " + std::to_string(kResults) +
          " results for each of 1 to " + std::to_string(kMaxLeaves) + " leaves, and keys, got " +
          std::to_string(operands.size()) + " operands and " + std::to_string(results.size()) + " results");
    }
    params->count = count;
    params->apply = apply;
    const ffi::AnyBuffer keys = *operands.get<ffi::AnyBuffer>(operands.size() - 1);
    int64_t key_count = 0;
    for (int64_t i = 0; i < count; ++i) {
      const std::string leaf = " " + std::to_string(i);
      int64_t operand = i * of_leaf, result = i * kResults;
      const auto next_operand = [&] { return *operands.get<ffi::AnyBuffer>(operand++); };
      const auto next_result = [&] { return **results.get<ffi::AnyBuffer>(result++); };

      const ffi::AnyBuffer grads = next_operand();
      JAXFP8_RETURN_IF_ERROR(CheckElements("grads" + leaf, grads, grads));
      AdamLeaf& to = params->leaves[i];
      to.rows = grads.dimensions()[0];
      to.n = grads.dimensions()[1];
      to.grads = Data<const float>(grads);
      if (apply) {
        const ffi::AnyBuffer of_apply = next_operand();
        JAXFP8_RETURN_IF_ERROR(CheckElements("params" + leaf, of_apply, grads));
        to.params = Data<const float>(of_apply);
      }
      const ffi::AnyBuffer out = next_result();
      JAXFP8_RETURN_IF_ERROR(CheckElements("out" + leaf, out, grads));
      to.out = Data<float>(out);
      for (const bool is_nu : {false, true}) {
        const std::string moment = is_nu ? "nu" : "mu";
        AdamMoment& to_moment = is_nu ? to.nu : to.mu;
        const ffi::AnyBuffer data = next_operand(), amax = next_operand(), exponent = next_operand();
        JAXFP8_RETURN_IF_ERROR(CheckMoment(moment, leaf, data, amax, exponent, grads));
        const ffi::AnyBuffer next_data = next_result(), next_amax = next_result(), next_exponent = next_result();
        JAXFP8_RETURN_IF_ERROR(CheckMoment("next " + moment, leaf, next_data, next_amax, next_exponent, grads));
        // The keys are added below, when it is known that there are as many.
        to_moment = {Data<const uint8_t>(data), Data<const float>(amax),  Data<const int8_t>(exponent),  nullptr,
                     Data<uint8_t>(next_data),  Data<float>(next_amax), Data<int8_t>(next_exponent)};
        key_count += static_cast<int64_t>(amax.element_count());
      }
      const ffi::AnyBuffer hyper = next_operand();
      JAXFP8_RETURN_IF_ERROR(CheckHyper("hyper" + leaf, hyper, to.rows));
      to.hyper = Data<const float>(hyper);
      const int64_t hypers = hyper.dimensions()[0];
      to.rows_per_hyper = hypers == 0 || to.rows == 0 ? 1 : to.rows / hypers;
    }
    JAXFP8_RETURN_IF_ERROR(CheckArray({kName, "keys", keys}, ffi::DataType::U32, {key_count}));
    const uint32_t* next_keys = Data<const uint32_t>(keys);
    for (int64_t i = 0; i < count; ++i) {
      AdamLeaf& leaf = params->leaves[i];
      const int64_t blocks = leaf.rows * (leaf.n / kMomentBlock + (leaf.n % kMomentBlock != 0));
      leaf.mu.keys = next_keys;
      leaf.nu.keys = next_keys + blocks;
      next_keys += 2 * blocks;
    }
    return ffi::Error::Success();
  }

 private:
  static constexpr int64_t kResults = 7;  // of a leaf

  // f32 [g, n], in the shape of `like`, which has passed.
  static ffi::Error CheckElements(const std::string& name, ffi::AnyBuffer buffer, ffi::AnyBuffer like) {
    const Operand operand{kName, name.c_str(), buffer};
    JAXFP8_RETURN_IF_ERROR(CheckDtype(operand, {ffi::DataType::F32}));
    JAXFP8_RETURN_IF_ERROR(CheckInput(operand, 2));
    return CheckShape(operand, like.dimensions());
  }

  static ffi::Error CheckMoment(const std::string& name, const std::string& leaf, ffi::AnyBuffer data,
                                ffi::AnyBuffer amax, ffi::AnyBuffer exponent, ffi::AnyBuffer like) {
    const std::string names[] = {name + " data" + leaf, name + " amax" + leaf, name + " exponent" + leaf};
    const MomentBuffers moment = {
        {kName, names[0].c_str(), data}, {kName, names[1].c_str(), amax}, {kName, names[2].c_str(), exponent}};
    return moment.Check({kName, names[0].c_str(), like});
  }

  // f32 [h, kAdamHypers], where h divides the rows.
  static ffi::Error CheckHyper(const std::string& name, ffi::AnyBuffer hyper, int64_t rows) {
    const Operand operand{kName, name.c_str(), hyper};
    JAXFP8_RETURN_IF_ERROR(CheckDtype(operand, {ffi::DataType::F32}));
    JAXFP8_RETURN_IF_ERROR(CheckInput(operand, 2));
    const int64_t hypers = hyper.dimensions()[0];
    if (hypers == 0 ? rows != 0 : rows % hypers != 0) {
      return Mismatch(operand, "a number of rows that divides the " + std::to_string(rows) + " of grads");
    }
    return CheckShape(operand, {hypers, kAdamHypers});
  }
};

}  // namespace jaxfp8

#endif  // JAXFP8_COMMON_FFI_ADAM_UPDATE_H_
