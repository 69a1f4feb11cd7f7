// scaled_matmul: the calls to cuBLASLt.
#include "cuda/kernels/scaled_matmul.h"

#include <limits>

#include "cuda/common/capture.h"
#include "cuda/kernels/gemm_plan.h"

namespace jaxfp8::cuda {
namespace {

// Bytes; cuBLASLt refuses scales (since 12.9.1) and a workspace that are not multiples of these.
constexpr int64_t kScaleAlignment = 16;
constexpr int64_t kWorkspaceAlignment = 256;

struct Workspace {
  uint8_t* data;
  int64_t bytes;
};

// The part of the buffer that starts at the first multiple of kWorkspaceAlignment.
Workspace AlignedWorkspace(const ScaledMatmulParams& params) {
  const int64_t rest = reinterpret_cast<uintptr_t>(params.workspace) % kWorkspaceAlignment;
  const int64_t skipped = rest == 0 ? 0 : kWorkspaceAlignment - rest;
  if (skipped >= params.workspace_bytes) return {nullptr, 0};
  return {static_cast<uint8_t*>(params.workspace) + skipped, params.workspace_bytes - skipped};
}

// Where `scales` is not aligned, copies the scales of `groups` groups of a matrix [rows, k] to the end of the workspace,
// which is that much smaller from then on. XLA aligns the buffers that it allocates; arguments of a program may lie
// anywhere. The copy has one dimension: a CUDA graph cannot take new addresses for a copy of two.
std::string AlignScales(const char* name, ScaleMode mode, int64_t rows, int64_t k, int64_t groups, int64_t stride,
                        const void** scales, Workspace* workspace, cudaStream_t stream) {
  if (reinterpret_cast<uintptr_t>(*scales) % kScaleAlignment == 0) return "";
  const int64_t bytes = ScaleBytes(mode, rows, k) + (groups - 1) * stride;
  if (bytes > workspace->bytes) {
    return std::string(name) + ": expected a pointer that is a multiple of 16 bytes, or a workspace of at least " +
           std::to_string(bytes) + " bytes to copy the scales to, got one of " + std::to_string(workspace->bytes);
  }
  workspace->bytes = (workspace->bytes - bytes) / kScaleAlignment * kScaleAlignment;
  void* const copy = workspace->data + workspace->bytes;
  const cudaError_t status = cudaMemcpyAsync(copy, *scales, bytes, cudaMemcpyDeviceToDevice, stream);
  if (status != cudaSuccess) return std::string("cudaMemcpyAsync failed: ") + cudaGetErrorName(status);
  *scales = copy;
  return "";
}

// From one batch to the next; a group's matrices are dense. Steps, and not `group * m * k` from the start: of that, GCC
// 12 makes group 0's addresses for every group (tests/cuda/fake_cublaslt, groups).
void NextBatch(const ScaledMatmulParams& params, GemmPointers* pointers) {
  pointers->a = static_cast<const uint8_t*>(pointers->a) + params.batch * params.m * params.k;
  pointers->b = static_cast<const uint8_t*>(pointers->b) + params.batch * params.n * params.k;
  pointers->a_scale_inv = static_cast<const uint8_t*>(pointers->a_scale_inv) + params.a_scale_stride;
  pointers->b_scale_inv = static_cast<const uint8_t*>(pointers->b_scale_inv) + params.b_scale_stride;
  const int64_t elements = params.batch * params.m * params.n;
  if (pointers->accumulator != nullptr) pointers->accumulator += elements;
  pointers->out = static_cast<uint8_t*>(pointers->out) + elements * ByteWidth(params.out_dtype);
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

std::string Multiply(const GemmDevice& device, const GemmShape& shape, const GemmPointers& pointers,
                     const Workspace& workspace, cudaStream_t stream) {
  GemmDescriptors descriptors;
  if (std::string error = descriptors.Init(shape, pointers); !error.empty()) return error;
  cublasLtMatmulAlgo_t algorithm;
  const GemmLimits limits = {workspace.bytes, CommonAlignment(pointers)};
  if (std::string error = GetGemmPlan(device, shape, limits, descriptors, &algorithm); !error.empty()) return error;
  return descriptors.Multiply(device.handle, algorithm, workspace.data, workspace.bytes, stream);
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
  if (params.batch > std::numeric_limits<int32_t>::max()) return "more groups with one scale than 31 bits count";
  if (const std::string& error = GetCublasLt().error; !error.empty()) return error;
  const AllowSetupDuringCapture allow_setup;
  GemmDevice device;
  if (std::string error = GetGemmDevice(&device); !error.empty()) return error;

  const GemmShape shape = {params.batch,
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
  GemmPointers pointers = {params.a,    params.b,           params.a_scale_inv, params.b_scale_inv,
                           params.bias, params.accumulator, params.out};
  Workspace workspace = AlignedWorkspace(params);
  const int64_t calls = params.groups / params.batch;
  std::string error = AlignScales("a_scale_inv", params.a_scales, params.m, params.k, calls, params.a_scale_stride,
                                  &pointers.a_scale_inv, &workspace, stream);
  if (!error.empty()) return error;
  error = AlignScales("b_scale_inv", params.b_scales, params.n, params.k, calls, params.b_scale_stride,
                      &pointers.b_scale_inv, &workspace, stream);
  if (!error.empty()) return error;
  for (int64_t call = 0; call < calls; ++call) {
    error = Multiply(device, shape, pointers, workspace, stream);
    if (!error.empty()) return error;
    NextBatch(params, &pointers);
  }
  return "";
}

}  // namespace jaxfp8::cuda
