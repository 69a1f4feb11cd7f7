// The tuner in Python's terms: `Gemm`, `Platform` and the fields of `Plan` of jaxfp8/ops/_plans.py.
#include "cuda/tuner_bindings.h"

#include <cuda_runtime_api.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>

#include <cstdio>
#include <initializer_list>
#include <stdexcept>
#include <string>
#include <string_view>
#include <tuple>

#include "cuda/kernels/gemm_plan.h"
#include "cuda/kernels/gemm_tuner.h"

namespace nb = nanobind;

namespace jaxfp8::cuda {
namespace {

constexpr size_t kWords = 8;
constexpr size_t kDigits = 16;  // of a word
static_assert(sizeof(cublasLtMatmulAlgo_t::data) == kWords * sizeof(uint64_t));

// A product and the limits of its plan.
struct Request {
  GemmShape shape;
  GemmLimits limits;
};

void RaiseIf(const std::string& error) {
  if (!error.empty()) throw std::runtime_error(error);
}

// Makes a device current, for a while.
class CurrentDevice {
 public:
  explicit CurrentDevice(int64_t ordinal) {
    cudaGetDevice(&previous_);
    status_ = cudaSetDevice(static_cast<int>(ordinal));
  }
  ~CurrentDevice() { cudaSetDevice(previous_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  GemmDevice Get() const {
    if (status_ != cudaSuccess) RaiseIf(std::string("cudaSetDevice failed: ") + cudaGetErrorName(status_));
    RaiseIf(GetCublasLt().error);
    GemmDevice device;
    RaiseIf(GetGemmDevice(&device));
    return device;
  }

 private:
  int previous_ = 0;
  cudaError_t status_;
};

Dtype ToDtype(std::string_view name) {
  if (name == "bf16") return Dtype::kBF16;
  if (name == "f16") return Dtype::kF16;
  if (name == "f32") return Dtype::kF32;
  if (name == "f8e4m3fn") return Dtype::kE4M3;
  if (name == "f8e5m2") return Dtype::kE5M2;
  throw std::invalid_argument("a format of a product: expected bf16, f16, f32, f8e4m3fn or f8e5m2, got " +
                              std::string(name));
}

bool IsFp8(Dtype dtype) { return dtype == Dtype::kE4M3 || dtype == Dtype::kE5M2; }

// Reads a `Gemm`. Files hold its numbers, so nothing about them is certain; a product that the handler would refuse has
// no plan.
Request ToRequest(nb::handle gemm) {
  const auto number = [&](const char* name) { return nb::cast<int64_t>(gemm.attr(name)); };
  const auto flag = [&](const char* name) { return nb::cast<bool>(gemm.attr(name)); };
  const auto format = [&](const char* name) { return ToDtype(nb::cast<std::string_view>(gemm.attr(name))); };
  const int64_t alignment = number("alignment");
  const Request request = {
      {number("batch"), number("m"), number("n"), number("k"), format("a"), format("b"), format("out"),
       flag("has_bias"), flag("accumulate"), flag("precise")},
      {number("workspace_bytes"), static_cast<uint32_t>(alignment)}};

  constexpr int64_t kMaxSize = int64_t{1} << 40;
  const GemmShape& shape = request.shape;
  bool valid = 1 <= shape.batch && shape.batch <= INT32_MAX;
  for (const int64_t size : {shape.m, shape.n, shape.k}) {
    valid = valid && 16 <= size && size <= kMaxSize && size % 16 == 0;
  }
  valid = valid && 0 <= request.limits.workspace_bytes && request.limits.workspace_bytes <= kMaxSize;
  valid = valid && 16 <= alignment && alignment <= kGemmAlignment && (alignment & (alignment - 1)) == 0;
  if (!valid) throw std::runtime_error("not a product that scaled_matmul computes");
  const bool formats = IsFp8(shape.a) && IsFp8(shape.b) && !IsFp8(shape.out) &&
                       (shape.a == Dtype::kE4M3 || shape.b == Dtype::kE4M3) &&
                       (!shape.accumulate || shape.out == Dtype::kF32);
  if (!formats) throw std::runtime_error("not formats that scaled_matmul computes with");
  return request;
}

// An algorithm is kept as its eight words, 128 hexadecimal digits.
cublasLtMatmulAlgo_t ToAlgorithm(const std::string& digits) {
  if (digits.size() != kWords * kDigits || digits.find_first_not_of("0123456789abcdef") != std::string::npos) {
    throw std::invalid_argument("an algorithm: expected 128 hexadecimal digits, got '" + digits + "'");
  }
  cublasLtMatmulAlgo_t algorithm;
  for (size_t i = 0; i < kWords; ++i) {
    algorithm.data[i] = std::stoull(digits.substr(i * kDigits, kDigits), nullptr, 16);
  }
  return algorithm;
}

std::string ToDigits(const cublasLtMatmulAlgo_t& algorithm) {
  char digits[kWords * kDigits + 1];
  for (size_t i = 0; i < kWords; ++i) {
    std::snprintf(digits + i * kDigits, kDigits + 1, "%016llx", static_cast<unsigned long long>(algorithm.data[i]));
  }
  return digits;
}

void CheckCublasLt() {
  const nb::gil_scoped_release release;
  RaiseIf(GetCublasLt().error);
}

std::tuple<std::string, int, size_t> Platform(int64_t ordinal) {
  const nb::gil_scoped_release release;
  const GemmPlatform platform = PlatformOf(CurrentDevice(ordinal).Get());
  return {platform.device_name, platform.capability, platform.cublaslt_version};
}

void SetPlan(nb::handle platform, nb::handle gemm, const std::string& algorithm) {
  const Request request = ToRequest(gemm);
  SetGemmPlan({nb::cast<std::string>(platform.attr("device_name")), nb::cast<int>(platform.attr("capability")),
               nb::cast<size_t>(platform.attr("cublaslt_version"))},
              request.shape, request.limits, ToAlgorithm(algorithm));
}

std::tuple<int64_t, int64_t> CountPlans() {
  const GemmPlanCounts counts = CountGemmPlans();
  return {counts.measured, counts.first};
}

std::tuple<std::string, double, double> Tune(int64_t ordinal, nb::handle gemm) {
  const Request request = ToRequest(gemm);
  const nb::gil_scoped_release release;
  const CurrentDevice current(ordinal);
  const GemmDevice device = current.Get();
  TunedGemm tuned;
  RaiseIf(TuneGemm(device, request.shape, request.limits, &tuned));
  SetGemmPlan(PlatformOf(device), request.shape, request.limits, tuned.algorithm);
  return {ToDigits(tuned.algorithm), tuned.microseconds, tuned.first_microseconds};
}

}  // namespace

void BindTuner(nb::module_& module) {
  module.def("check_cublaslt", &CheckCublasLt,
             "Raise a RuntimeError with the reason if cuBLASLt cannot be opened or lacks a function.");
  module.def("gemm_platform", &Platform, nb::arg("device"),
             "Return (device_name, capability, cublaslt_version) of the device with that ordinal.");
  module.def("set_gemm_plan", &SetPlan, nb::arg("platform"), nb::arg("gemm"), nb::arg("algorithm"),
             "Use an algorithm for a product on a platform, which need not be this machine's.");
  module.def("count_gemm_plans", &CountPlans,
             "Return how many plans products have used so far: (measured, the first that cuBLASLt offered).");
  module.def("tune_gemm", &Tune, nb::arg("device"), nb::arg("gemm"),
             "Time the algorithms for a product on a device and use the fastest: (algorithm, microseconds, "
             "first_microseconds). The device waits, so a training step must not call this.");
}

}  // namespace jaxfp8::cuda
