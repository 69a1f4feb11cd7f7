// C functions over the table of plans and the tuner.
#include "cuda/kernels/gemm_c_api.h"

#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstring>
#include <initializer_list>
#include <string>

#include "cuda/kernels/gemm_plan.h"
#include "cuda/kernels/gemm_tuner.h"

#define JAXFP8_EXPORT __attribute__((visibility("default")))

namespace jaxfp8::cuda {
namespace {

static_assert(sizeof(cublasLtMatmulAlgo_t::data) == sizeof(jaxfp8_tuned_gemm::algorithm));

void Report(const std::string& reason, char* error, int64_t error_size) {
  std::snprintf(error, error_size, "%s", reason.c_str());
}

// Makes a device current, for a while.
class CurrentDevice {
 public:
  explicit CurrentDevice(int64_t device) {
    cudaGetDevice(&previous_);
    status_ = cudaSetDevice(static_cast<int>(device));
  }
  ~CurrentDevice() { cudaSetDevice(previous_); }
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

  std::string Get(GemmDevice* device) const {
    if (status_ != cudaSuccess) return std::string("cudaSetDevice failed: ") + cudaGetErrorName(status_);
    if (const std::string& error = GetCublasLt().error; !error.empty()) return error;
    return GetGemmDevice(device);
  }

 private:
  int previous_ = 0;
  cudaError_t status_;
};

bool IsFp8(Dtype dtype) { return dtype == Dtype::kE4M3 || dtype == Dtype::kE5M2; }

// Files hold these numbers, so nothing about them is certain. Products that the handler would refuse have no plans.
std::string Read(const jaxfp8_gemm& gemm, GemmShape* shape, GemmLimits* limits) {
  constexpr int64_t kMaxSize = int64_t{1} << 40;
  const auto in_range = [](int64_t low, int64_t high, std::initializer_list<int64_t> values) {
    for (const int64_t value : values) {
      if (value < low || value > high) return false;
    }
    return true;
  };
  const bool valid = in_range(1, INT32_MAX, {gemm.batch}) && in_range(16, kMaxSize, {gemm.m, gemm.n, gemm.k}) &&
                     (gemm.m | gemm.n | gemm.k) % 16 == 0 && in_range(0, 4, {gemm.a, gemm.b, gemm.out}) &&
                     in_range(0, 1, {gemm.has_bias, gemm.accumulate, gemm.precise}) &&
                     in_range(0, kMaxSize, {gemm.workspace_bytes}) &&
                     in_range(16, kGemmAlignment, {gemm.alignment}) && (gemm.alignment & (gemm.alignment - 1)) == 0;
  if (!valid) return "not a product that scaled_matmul computes";
  *shape = {gemm.batch,
            gemm.m,
            gemm.n,
            gemm.k,
            static_cast<Dtype>(gemm.a),
            static_cast<Dtype>(gemm.b),
            static_cast<Dtype>(gemm.out),
            gemm.has_bias != 0,
            gemm.accumulate != 0,
            gemm.precise != 0};
  *limits = {gemm.workspace_bytes, static_cast<uint32_t>(gemm.alignment)};
  const bool formats = IsFp8(shape->a) && IsFp8(shape->b) && !IsFp8(shape->out) &&
                       (shape->a == Dtype::kE4M3 || shape->b == Dtype::kE4M3) &&
                       (!shape->accumulate || shape->out == Dtype::kF32);
  return formats ? "" : "not formats that scaled_matmul computes with";
}

cublasLtMatmulAlgo_t ToAlgorithm(const uint64_t* words) {
  cublasLtMatmulAlgo_t algorithm;
  std::memcpy(algorithm.data, words, sizeof(algorithm.data));
  return algorithm;
}

std::string Platform(int64_t ordinal, jaxfp8_gemm_platform* out) {
  const CurrentDevice current(ordinal);
  GemmDevice device;
  if (std::string error = current.Get(&device); !error.empty()) return error;
  const GemmPlatform platform = PlatformOf(device);
  std::snprintf(out->device_name, sizeof(out->device_name), "%s", platform.device_name.c_str());
  out->capability = platform.capability;
  out->cublaslt_version = static_cast<int64_t>(platform.cublaslt_version);
  return "";
}

std::string SetPlan(const jaxfp8_gemm_platform& platform, const jaxfp8_gemm& gemm, const uint64_t* algorithm) {
  GemmShape shape;
  GemmLimits limits;
  if (std::string error = Read(gemm, &shape, &limits); !error.empty()) return error;
  SetGemmPlan({platform.device_name, static_cast<int>(platform.capability),
               static_cast<size_t>(platform.cublaslt_version)},
              shape, limits, ToAlgorithm(algorithm));
  return "";
}

std::string Tune(int64_t ordinal, const jaxfp8_gemm& gemm, jaxfp8_tuned_gemm* out) {
  GemmShape shape;
  GemmLimits limits;
  if (std::string error = Read(gemm, &shape, &limits); !error.empty()) return error;
  const CurrentDevice current(ordinal);
  GemmDevice device;
  if (std::string error = current.Get(&device); !error.empty()) return error;
  TunedGemm tuned;
  if (std::string error = TuneGemm(device, shape, limits, &tuned); !error.empty()) return error;
  SetGemmPlan(PlatformOf(device), shape, limits, tuned.algorithm);
  std::memcpy(out->algorithm, tuned.algorithm.data, sizeof(out->algorithm));
  out->microseconds = tuned.microseconds;
  out->first_microseconds = tuned.first_microseconds;
  out->timed = tuned.timed;
  return "";
}

}  // namespace
}  // namespace jaxfp8::cuda

extern "C" {

JAXFP8_EXPORT void jaxfp8_cublaslt_v1(char* error, int64_t error_size) {
  jaxfp8::cuda::Report(jaxfp8::cuda::GetCublasLt().error, error, error_size);
}

JAXFP8_EXPORT void jaxfp8_gemm_platform_v1(int64_t device, jaxfp8_gemm_platform* platform, char* error,
                                           int64_t error_size) {
  jaxfp8::cuda::Report(jaxfp8::cuda::Platform(device, platform), error, error_size);
}

JAXFP8_EXPORT void jaxfp8_set_gemm_plan_v1(const jaxfp8_gemm_platform* platform, const jaxfp8_gemm* gemm,
                                           const uint64_t* algorithm, char* error, int64_t error_size) {
  jaxfp8::cuda::Report(jaxfp8::cuda::SetPlan(*platform, *gemm, algorithm), error, error_size);
}

JAXFP8_EXPORT void jaxfp8_count_gemm_plans_v1(int64_t* measured, int64_t* first, char* error, int64_t error_size) {
  const jaxfp8::cuda::GemmPlanCounts counts = jaxfp8::cuda::CountGemmPlans();
  *measured = counts.measured;
  *first = counts.first;
  jaxfp8::cuda::Report("", error, error_size);
}

JAXFP8_EXPORT void jaxfp8_tune_gemm_v1(int64_t device, const jaxfp8_gemm* gemm, jaxfp8_tuned_gemm* tuned, char* error,
                                       int64_t error_size) {
  jaxfp8::cuda::Report(jaxfp8::cuda::Tune(device, *gemm, tuned), error, error_size);
}

}  // extern "C"
