// The plan cache, and the question to cuBLASLt's heuristic behind it.
#include "cuda/kernels/gemm_plan.h"

#include <map>
#include <memory>
#include <mutex>
#include <sstream>
#include <tuple>

namespace jaxfp8::cuda {
namespace {

constexpr int kCandidates = 8;

using Key = std::tuple<int64_t, int64_t, int64_t, int64_t,  // batch, m, n, k
                       Dtype, Dtype, Dtype,                 // a, b, out
                       bool, bool, bool,                    // has_bias, accumulate, precise
                       int64_t, uint32_t,                   // workspace bytes, alignment
                       int, int, size_t>;                   // device, its capability, version of cuBLASLt

Key MakeKey(const GemmDevice& device, const GemmShape& shape, const GemmLimits& limits) {
  return {shape.batch, shape.m, shape.n, shape.k, shape.a, shape.b, shape.out, shape.has_bias, shape.accumulate,
          shape.precise, limits.workspace_bytes, limits.alignment, device.ordinal, device.capability,
          GetCublasLt().GetVersion()};
}

struct Plans {
  std::mutex mutex;
  std::map<Key, cublasLtMatmulAlgo_t> algorithms;
};

// Never destroyed, so that a thread that is still running at exit finds it alive.
Plans& GetPlans() {
  static Plans& plans = *new Plans;
  return plans;
}

struct DestroyPreference {
  void operator()(cublasLtMatmulPreference_t preference) const { GetCublasLt().MatmulPreferenceDestroy(preference); }
};
using Preference = std::unique_ptr<cublasLtMatmulPreferenceOpaque_t, DestroyPreference>;

cublasStatus_t MakePreference(const GemmLimits& limits, Preference* preference) {
  const CublasLt& lt = GetCublasLt();
  cublasLtMatmulPreference_t raw = nullptr;
  cublasStatus_t status = lt.MatmulPreferenceCreate(&raw);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  preference->reset(raw);
  const uint64_t workspace_bytes = limits.workspace_bytes;
  status = lt.MatmulPreferenceSetAttribute(raw, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace_bytes,
                                           sizeof(workspace_bytes));
  // Without these the heuristic assumes 256 bytes.
  for (const auto attribute : {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES,
                               CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES,
                               CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES}) {
    if (status != CUBLAS_STATUS_SUCCESS) break;
    status = lt.MatmulPreferenceSetAttribute(raw, attribute, &limits.alignment, sizeof(limits.alignment));
  }
  return status;
}

std::string DescribeShape(const GemmDevice& device, const GemmShape& shape, const GemmLimits& limits) {
  const auto name = [](Dtype dtype) {
    static constexpr const char* kNames[] = {"bf16", "f16", "f32", "e4m3", "e5m2"};
    return kNames[static_cast<int>(dtype)];
  };
  std::ostringstream text;
  text << "a " << name(shape.a) << "[" << shape.batch << "," << shape.m << "," << shape.k << "], b " << name(shape.b)
       << "[" << shape.batch << "," << shape.n << "," << shape.k << "], out " << name(shape.out)
       << (shape.has_bias ? ", bias" : "") << (shape.accumulate ? ", accumulator" : "")
       << (shape.precise ? ", precise" : "") << ", workspace of " << limits.workspace_bytes << " bytes, alignment "
       << limits.alignment << ", compute capability " << device.capability / 10 << "." << device.capability % 10
       << ", cuBLASLt " << GetCublasLt().GetVersion();
  return text.str();
}

std::string Search(const GemmDevice& device, const GemmShape& shape, const GemmLimits& limits,
                   const GemmDescriptors& descriptors, cublasLtMatmulAlgo_t* algorithm) {
  const CublasLt& lt = GetCublasLt();
  Preference preference;
  cublasStatus_t status = MakePreference(limits, &preference);
  cublasLtMatmulHeuristicResult_t candidates[kCandidates] = {};
  int found = 0;
  if (status == CUBLAS_STATUS_SUCCESS) {
    status = lt.MatmulAlgoGetHeuristic(device.handle, descriptors.operation(), descriptors.a(), descriptors.b(),
                                       descriptors.out(), descriptors.out(), preference.get(), kCandidates, candidates,
                                       &found);
  }
  // Sorted by estimated time; each has a status of its own.
  for (int i = 0; status == CUBLAS_STATUS_SUCCESS && i < found; ++i) {
    if (candidates[i].state == CUBLAS_STATUS_SUCCESS) {
      *algorithm = candidates[i].algo;
      return "";
    }
  }
  const char* reason = status == CUBLAS_STATUS_SUCCESS ? "no candidate" : lt.GetStatusName(status);
  return std::string("no cuBLASLt algorithm (") + reason + ") for " + DescribeShape(device, shape, limits);
}

}  // namespace

std::string GetGemmPlan(const GemmDevice& device, const GemmShape& shape, const GemmLimits& limits,
                        const GemmDescriptors& descriptors, cublasLtMatmulAlgo_t* algorithm) {
  const Key key = MakeKey(device, shape, limits);
  Plans& plans = GetPlans();
  {
    std::lock_guard<std::mutex> lock(plans.mutex);
    if (const auto found = plans.algorithms.find(key); found != plans.algorithms.end()) {
      *algorithm = found->second;
      return "";
    }
  }
  // Outside the lock: a search takes long enough that other shapes should not wait for it.
  if (std::string error = Search(device, shape, limits, descriptors, algorithm); !error.empty()) return error;
  std::lock_guard<std::mutex> lock(plans.mutex);
  *algorithm = plans.algorithms.emplace(key, *algorithm).first->second;
  return "";
}

}  // namespace jaxfp8::cuda
