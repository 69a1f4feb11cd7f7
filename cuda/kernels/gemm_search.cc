// The questions to cuBLASLt's heuristic.
#include "cuda/kernels/gemm_search.h"

#include <memory>
#include <sstream>

namespace jaxfp8::cuda {
namespace {

// All that cuBLASLt is likely to have for one GEMM.
constexpr int kCandidates = 32;

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
  // Where an algorithm cuts k, it adds the parts in f32: in the dtype of the result each part would be rounded to it.
  const uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  if (status == CUBLAS_STATUS_SUCCESS) {
    status = lt.MatmulPreferenceSetAttribute(raw, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof(schemes));
  }
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
  const auto scales = [](ScaleMode mode) {
    static constexpr const char* kNames[] = {"", " scaled by rows", " scaled 1x32", " scaled 1x128", " scaled 128x128"};
    return kNames[static_cast<int>(mode)];
  };
  std::ostringstream text;
  text << "a " << name(shape.a) << "[" << shape.batch << "," << shape.m << "," << shape.k << "]"
       << scales(shape.a_scales) << ", b " << name(shape.b) << "[" << shape.batch << "," << shape.n << "," << shape.k
       << "]" << scales(shape.b_scales) << ", out " << name(shape.out)
       << (shape.has_bias ? ", bias" : "") << (shape.accumulate ? ", accumulator" : "")
       << (shape.precise ? ", precise" : "") << ", workspace of " << limits.workspace_bytes << " bytes, alignment "
       << limits.alignment << ", compute capability " << device.capability / 10 << "." << device.capability % 10
       << ", cuBLASLt " << GetCublasLt().GetVersion();
  return text.str();
}

}  // namespace

std::string FindGemmAlgorithm(const GemmDevice& device, const GemmShape& shape, const GemmLimits& limits,
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
    const cublasLtMatmulHeuristicResult_t& candidate = candidates[i];
    if (candidate.state == CUBLAS_STATUS_SUCCESS &&
        candidate.workspaceSize <= static_cast<uint64_t>(limits.workspace_bytes)) {
      *algorithm = candidate.algo;
      return "";
    }
  }
  const char* reason = status == CUBLAS_STATUS_SUCCESS ? "no candidate" : lt.GetStatusName(status);
  return std::string("no cuBLASLt algorithm (") + reason + ") for " + DescribeShape(device, shape, limits);
}

}  // namespace jaxfp8::cuda
