// The table of plans.
#include "cuda/kernels/gemm_plan.h"

#include <map>
#include <mutex>
#include <tuple>
#include <vector>

namespace jaxfp8::cuda {
namespace {

using Key = std::tuple<int64_t, int64_t, int64_t, int64_t,  // batch, m, n, k
                       Dtype, Dtype, Dtype,                 // a, b, out
                       bool, bool, bool,                    // has_bias, accumulate, precise
                       ScaleMode, ScaleMode,                // of a, of b
                       int64_t, uint32_t,                   // workspace bytes, alignment
                       std::string, int, size_t>;           // device, its capability, version of cuBLASLt

Key MakeKey(const GemmPlatform& platform, const GemmShape& shape, const GemmLimits& limits) {
  return {shape.batch, shape.m, shape.n, shape.k, shape.a, shape.b, shape.out, shape.has_bias, shape.accumulate,
          shape.precise, shape.a_scales, shape.b_scales, limits.workspace_bytes, limits.alignment,
          platform.device_name, platform.capability, platform.cublaslt_version};
}

struct Plan {
  cublasLtMatmulAlgo_t algorithm;
  bool measured;
  bool checked;  // cuBLASLt of this process proposed it, or accepted it; used since
};

struct Plans {
  std::mutex mutex;
  std::map<Key, Plan> by_key;
};

// Never destroyed, so that a thread that is still running at exit finds it alive.
Plans& GetPlans() {
  static Plans& plans = *new Plans;
  return plans;
}

}  // namespace

GemmPlatform PlatformOf(const GemmDevice& device) {
  return {device.name, device.capability, GetCublasLt().GetVersion()};
}

void SetGemmPlan(const GemmPlatform& platform, const GemmShape& shape, const GemmLimits& limits,
                 const cublasLtMatmulAlgo_t& algorithm) {
  Plans& plans = GetPlans();
  std::lock_guard<std::mutex> lock(plans.mutex);
  plans.by_key[MakeKey(platform, shape, limits)] = {algorithm, /*measured=*/true, /*checked=*/false};
}

std::string GetGemmPlan(const GemmDevice& device, const GemmShape& shape, const GemmLimits& limits,
                        const GemmDescriptors& descriptors, cublasLtMatmulAlgo_t* algorithm) {
  const Key key = MakeKey(PlatformOf(device), shape, limits);
  Plans& plans = GetPlans();
  bool measured = false;
  {
    std::lock_guard<std::mutex> lock(plans.mutex);
    if (const auto found = plans.by_key.find(key); found != plans.by_key.end()) {
      *algorithm = found->second.algorithm;
      if (found->second.checked) return "";
      measured = true;
    }
  }
  // Outside the lock: cuBLASLt takes long enough that other shapes should not wait for it.
  if (!measured || !IsRunnable(device, limits, descriptors, *algorithm)) {
    measured = false;
    std::vector<cublasLtMatmulAlgo_t> algorithms;
    std::string error = FindGemmAlgorithms(device, shape, limits, descriptors, &algorithms);
    if (!error.empty()) return error;
    *algorithm = algorithms.front();
  }
  // Another thread may have come here first: then its answer, unless that one is still to be checked.
  std::lock_guard<std::mutex> lock(plans.mutex);
  Plan& plan = plans.by_key.try_emplace(key, Plan{}).first->second;
  if (!plan.checked) plan = {*algorithm, measured, /*checked=*/true};
  *algorithm = plan.algorithm;
  return "";
}

GemmPlanCounts CountGemmPlans() {
  Plans& plans = GetPlans();
  std::lock_guard<std::mutex> lock(plans.mutex);
  GemmPlanCounts counts = {};
  for (const auto& [key, plan] : plans.by_key) {
    if (plan.checked) ++(plan.measured ? counts.measured : counts.first);
  }
  return counts;
}

}  // namespace jaxfp8::cuda
