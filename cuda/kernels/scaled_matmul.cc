// scaled_matmul: the calls to cuBLASLt.
#include "cuda/kernels/scaled_matmul.h"

#include <limits>

#include "cuda/common/capture.h"
#include "cuda/kernels/gemm_plan.h"

namespace jaxfp8::cuda {
namespace {

GemmPointers FirstGroup(const ScaledMatmulParams& params) {
  return {params.a, params.b, params.a_scale_inv, params.b_scale_inv, params.bias, params.accumulator, params.out};
}

// From one group to the next; a group's matrices are dense. Steps, and not `group * m * k` from the start: of that, GCC
// 12 makes group 0's addresses for every group (tests/cuda/fake_cublaslt, groups).
void NextGroup(const ScaledMatmulParams& params, GemmPointers* pointers) {
  pointers->a = static_cast<const uint8_t*>(pointers->a) + params.m * params.k;
  pointers->b = static_cast<const uint8_t*>(pointers->b) + params.n * params.k;
  pointers->a_scale_inv = static_cast<const uint8_t*>(pointers->a_scale_inv) + params.a_scale_stride;
  pointers->b_scale_inv = static_cast<const uint8_t*>(pointers->b_scale_inv) + params.b_scale_stride;
  if (pointers->accumulator != nullptr) pointers->accumulator += params.m * params.n;
  pointers->out = static_cast<uint8_t*>(pointers->out) + params.m * params.n * ByteWidth(params.out_dtype);
}

// The largest power of two that divides every address, up to the alignment at which plans are kept.
uint32_t CommonAlignment(const GemmPointers& pointers) {
  uintptr_t bits = kGemmAlignment;
  for (const void* pointer : {pointers.a, pointers.b, pointers.bias, static_cast<const void*>(pointers.accumulator),
                              static_cast<const void*>(pointers.out)}) {
    bits |= reinterpret_cast<uintptr_t>(pointer);
  }
  return static_cast<uint32_t>(bits & (~bits + 1));
}

std::string Multiply(const GemmDevice& device, const GemmShape& shape, const GemmPointers& pointers, void* workspace,
                     int64_t workspace_bytes, cudaStream_t stream) {
  GemmDescriptors descriptors;
  if (std::string error = descriptors.Init(shape, pointers); !error.empty()) return error;
  cublasLtMatmulAlgo_t algorithm;
  const GemmLimits limits = {workspace_bytes, CommonAlignment(pointers)};
  if (std::string error = GetGemmPlan(device, shape, limits, descriptors, &algorithm); !error.empty()) return error;
  return descriptors.Multiply(device.handle, algorithm, workspace, workspace_bytes, stream);
}

}  // namespace

std::string PrepareScaledMatmul() {
  if (const std::string& error = GetCublasLt().error; !error.empty()) return error;
  GemmDevice device;
  return GetGemmDevice(&device);
}

std::string LaunchScaledMatmul(const ScaledMatmulParams& params, cudaStream_t stream) {
  const int64_t out_elements = params.groups * params.m * params.n;
  if (out_elements == 0) return "";
  if (params.k == 0) {
    const cudaError_t status = cudaMemsetAsync(params.out, 0, out_elements * ByteWidth(params.out_dtype), stream);
    return status == cudaSuccess ? "" : std::string("cudaMemsetAsync failed: ") + cudaGetErrorName(status);
  }
  if (const std::string& error = GetCublasLt().error; !error.empty()) return error;
  const AllowSetupDuringCapture allow_setup;
  GemmDevice device;
  if (std::string error = GetGemmDevice(&device); !error.empty()) return error;

  // cuBLASLt reads one scale for a whole batch, so groups with scales of their own are calls of their own.
  const bool one_call = params.groups == 1 || (params.a_scale_stride == 0 && params.b_scale_stride == 0 &&
                                               params.groups <= std::numeric_limits<int32_t>::max());
  const GemmShape shape = {one_call ? params.groups : 1,
                           params.m,
                           params.n,
                           params.k,
                           params.a_dtype,
                           params.b_dtype,
                           params.out_dtype,
                           params.bias != nullptr,
                           params.accumulator != nullptr,
                           params.precise,
                           params.a_scales,
                           params.b_scales};
  GemmPointers pointers = FirstGroup(params);
  for (int64_t calls = one_call ? 1 : params.groups; calls > 0; --calls) {
    std::string error = Multiply(device, shape, pointers, params.workspace, params.workspace_bytes, stream);
    if (!error.empty()) return error;
    NextGroup(params, &pointers);
  }
  return "";
}

}  // namespace jaxfp8::cuda
