// The table of plans.
#include "cuda/kernels/gemm_plan.h"

#include <map>
#include <mutex>
#include <tuple>

namespace jaxfp8::cuda {
namespace {

using Key = std::tuple<int64_t, int64_t, int64_t, int64_t,  // batch, m, n, k
                       Dtype, Dtype, Dtype,                 // a, b, out
                       bool, bool, bool,                    // has_bias, accumulate, precise
                       ScaleMode, ScaleMode,                // of a, of b
                       int64_t, uint32_t,                   // workspace bytes, alignment
                       std::string, int>;                   // device, its capability

struct Plans {
  std::mutex mutex;
  std::map<Key, cublasLtMatmulAlgo_t> by_key;
};

// Never destroyed, so that a thread that is still running at exit finds it alive.
Plans& GetPlans() {
  static Plans& plans = *new Plans;
  return plans;
}

}  // namespace

std::string GetGemmPlan(const GemmDevice& device, const GemmShape& shape, const GemmLimits& limits,
                        const GemmDescriptors& descriptors, cublasLtMatmulAlgo_t* algorithm) {
  const Key key = {shape.batch, shape.m, shape.n, shape.k, shape.a, shape.b, shape.out, shape.has_bias, shape.accumulate,
                   shape.precise, shape.a_scales, shape.b_scales, limits.workspace_bytes, limits.alignment,
                   device.name, device.capability};
  Plans& plans = GetPlans();
  {
    std::lock_guard<std::mutex> lock(plans.mutex);
    if (const auto found = plans.by_key.find(key); found != plans.by_key.end()) {
      *algorithm = found->second;
      return "";
    }
  }
  // Outside the lock: cuBLASLt takes long enough that other shapes should not wait for it.
  std::string error = FindGemmAlgorithm(device, shape, limits, descriptors, algorithm);
  if (!error.empty()) return error;
  // Another thread may have come here first: then its answer.
  std::lock_guard<std::mutex> lock(plans.mutex);
  *algorithm = plans.by_key.try_emplace(key, *algorithm).first->second;
  return "";
}

}  // namespace jaxfp8::cuda
