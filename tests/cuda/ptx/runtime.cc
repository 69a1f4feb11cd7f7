// Stands in for the CUDA runtime: nvcc's objects register their kernels here and launch them, with the grids and
// parameters that the launchers give. The functions at the end are for the tests, some by names of the emulator.
#include <cuda.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cfenv>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <string>
#include <unordered_map>

#include "bulk.h"
#include "faults.h"
#include "memory.h"
#include "numbers.h"
#include "program.h"
#include "warp.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// What a launch may have (CUDA's Programming Guide, "Compute Capabilities").
constexpr uint32_t kMostThreads = 1024;
constexpr uint64_t kMostParameterBytes = 4096, kMostSharedBytes = 48 * 1024, kMostDynamicBytes = 227 * 1024;

std::mutex mutex;
std::unordered_map<const void*, std::string> names;
std::map<std::string, int64_t> launches;
std::unordered_map<const void*, uint64_t> dynamic_bytes;  // that kernels have asked for
std::string fault;
int multiprocessors = 132;
int capability = 0;  // the first number of that of the PTX
int64_t kernels = 0, memsets = 0, copies = 0;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeThreadLocal;

[[noreturn]] void Die(const char* function) {
  std::fprintf(stderr, "tests/cuda/ptx: the launchers do not call %s\n", function);
  std::abort();
}

// Streams are always captured, and every call is the first: CUDA allows it only where the thread has relaxed the mode.
cudaError_t FirstUse() {
  return capture_mode == cudaStreamCaptureModeRelaxed ? cudaSuccess : cudaErrorStreamCaptureUnsupported;
}

// Runs `function`; a fault becomes the message that the tests ask for, and an error of the call.
template <class Function>
cudaError_t Guarded(const Function& function) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (FirstUse() != cudaSuccess) return FirstUse();
  std::fenv_t environment;  // XLA's threads flush subnormal numbers, a GPU does not
  std::fegetenv(&environment);
  std::fesetenv(FE_DFL_ENV);
  cudaError_t status = cudaSuccess;
  try {
    function();
  } catch (const ptx::Fault& found) {
    if (fault.empty()) fault = found.message;
    status = cudaErrorLaunchFailure;
  }
  std::fesetenv(&environment);
  ptx::position = {};
  return status;
}

uint64_t SharedBytes(const ptx::Kernel& kernel) {
  uint64_t bytes = 0;
  for (const ptx::Variable& variable : kernel.shared) bytes += static_cast<uint64_t>(variable.bytes);
  return bytes;
}

void CheckLaunch(const ptx::Kernel& kernel, const cudaLaunchConfig_t& config, uint64_t most_shared_bytes) {
  const auto check = [](bool is_allowed, const char* reason) {
    if (!is_allowed) ptx::Refuse("launch", reason);
  };
  const uint32_t threads = config.blockDim.x;
  check(config.blockDim.y == 1 && config.blockDim.z == 1 && config.gridDim.y == 1 && config.gridDim.z == 1,
        "grids and blocks of these kernels have one dimension");
  check(threads > 0 && config.gridDim.x > 0, "a grid without threads");
  check(threads <= kMostThreads && (kernel.max_threads == 0 || threads <= kernel.max_threads), "too many threads");
  check(config.numAttrs == 0, "attributes: unknown here");
  check(static_cast<uint64_t>(kernel.parameter_bytes) <= kMostParameterBytes, "too many bytes of parameters");
  check(SharedBytes(kernel) + config.dynamicSmemBytes <= most_shared_bytes, "too many bytes of shared memory");
}

void Launch(const cudaLaunchConfig_t& config, const void* function, void** arguments) {
  const auto name = names.find(function);
  if (name == names.end()) Die("an unregistered kernel");
  ++launches[name->second];
  const ptx::Kernel& kernel = ptx::FindKernel(name->second);
  ptx::position.kernel = &kernel;
  const auto asked = dynamic_bytes.find(function);
  CheckLaunch(kernel, config, std::max(kMostSharedBytes, asked == dynamic_bytes.end() ? 0 : asked->second));
  std::vector<uint8_t> parameters(static_cast<size_t>(kernel.parameter_bytes));
  for (size_t i = 0; i < kernel.parameters.size(); ++i) {
    const ptx::Variable& parameter = kernel.parameters[i];
    std::memcpy(parameters.data() + parameter.address, arguments[i], static_cast<size_t>(parameter.bytes));
  }
  ptx::instructions = 0;
  ptx::epoch.launch_begin = ++ptx::epoch.now;
  const uint32_t blocks = config.gridDim.x;
  ptx::Block block(kernel, config.blockDim.x, blocks, static_cast<uint32_t>(config.dynamicSmemBytes), parameters);
  for (uint32_t i = 0; i < blocks; ++i) block.Run(ptx::runs_backwards ? blocks - 1 - i : i);
}

}  // namespace

// --------------------------------------------------------------------------------------------- what nvcc's code calls
EXPORT void** __cudaRegisterFatBinary(void*) {
  static void* handle;
  return &handle;
}
EXPORT void __cudaRegisterFatBinaryEnd(void**) {}
EXPORT void __cudaUnregisterFatBinary(void**) {}
EXPORT void __cudaRegisterFunction(void**, const char* host, char*, const char* name, int, void*, void*, void*, void*,
                                   int*) {
  names[host] = name;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3*, dim3*, size_t*, void*) { Die("kernel<<<>>>"); }
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t*, const void*) { Die("kernel<<<>>>"); }
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t, dim3, dim3, void**, size_t, cudaStream_t) { Die("kernel<<<>>>"); }

// -------------------------------------------------------------------------------------------- what the launchers call
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t* config, const void* function, void** arguments) {
  ++kernels;
  return Guarded([&] { Launch(*config, function, arguments); });
}
EXPORT cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return FirstUse();
}
EXPORT cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  if (attribute != cudaDevAttrMultiProcessorCount && attribute != cudaDevAttrComputeCapabilityMajor) {
    Die("cudaDeviceGetAttribute for this attribute");
  }
  *value = attribute == cudaDevAttrMultiProcessorCount ? multiprocessors : capability;
  return FirstUse();
}
EXPORT cudaError_t cudaFuncSetAttribute(const void* function, cudaFuncAttribute attribute, int value) {
  if (attribute != cudaFuncAttributeMaxDynamicSharedMemorySize) Die("cudaFuncSetAttribute for this attribute");
  dynamic_bytes[function] = static_cast<uint64_t>(value);
  return static_cast<uint64_t>(value) <= kMostDynamicBytes ? FirstUse() : cudaErrorInvalidValue;
}
EXPORT cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}
EXPORT cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t) {
  ++memsets;
  return Guarded([&] {
    ptx::FillGlobal(reinterpret_cast<uint64_t>(address), bytes);
    std::memset(address, value, bytes);
  });
}
EXPORT cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  ++copies;
  return Guarded([&] {
    const bool is_buffer = ptx::IsInBuffer(reinterpret_cast<uint64_t>(from), bytes);
    if (!is_buffer) ptx::Refuse("outside", "the runtime reads no buffer");
    ptx::FillGlobal(reinterpret_cast<uint64_t>(to), bytes);
    std::memcpy(to, from, bytes);
  });
}

// What the driver asks of a map (cuTensorMapEncodeTiled), for the kind of map that the kernels have.
static CUresult MakeTensorMap(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* base, const cuuint64_t* sizes,
                              const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps,
                              CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle, CUtensorMapL2promotion,
                              CUtensorMapFloatOOBfill fill) {
  const auto address = reinterpret_cast<uint64_t>(base);
  const bool is_known = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 && rank == 3 && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE &&
                        swizzle == CU_TENSOR_MAP_SWIZZLE_128B && fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
  bool is_right = is_known && address % 16 == 0 && reinterpret_cast<uint64_t>(map) % 64 == 0 && box[0] <= 128;
  ptx::TensorMap made = {ptx::TensorMap::kMark, address, {}, {}, {}};
  for (size_t i = 0; i < 3; ++i) {
    made.sizes[i] = sizes[i];
    made.box[i] = box[i];
    is_right &= sizes[i] > 0 && sizes[i] <= uint64_t{1} << 32 && box[i] > 0 && box[i] <= 256 && steps[i] == 1;
    if (i == 2) break;
    made.strides[i] = strides[i];
    is_right &= strides[i] % 16 == 0 && strides[i] < uint64_t{1} << 40;
  }
  if (!is_right || box[0] % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  std::memcpy(map, &made, sizeof(made));
  return CUDA_SUCCESS;
}
EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char* symbol, void** function, unsigned int, unsigned long long,
                                                    cudaDriverEntryPointQueryResult* found) {
  if (std::strcmp(symbol, "cuTensorMapEncodeTiled") != 0) Die(symbol);
  *function = reinterpret_cast<void*>(MakeTensorMap);
  *found = cudaDriverEntryPointSuccess;
  return FirstUse();
}

// ------------------------------------------------------------------------------------------------------ for the tests
EXPORT void ptx_use_folder(const char* folder) {
  const std::lock_guard<std::mutex> lock(mutex);
  ptx::UseFolder(folder);
}
EXPORT void ptx_be(int major) { capability = major; }
EXPORT void ptx_add_buffer(const void* address, uint64_t bytes, int is_written, int is_writable) {
  const std::lock_guard<std::mutex> lock(mutex);
  ptx::AddBuffer(address, bytes, is_written != 0, is_writable != 0);
}
EXPORT void ptx_remove_buffer(const void* address) {
  const std::lock_guard<std::mutex> lock(mutex);
  ptx::RemoveBuffer(address);
}
EXPORT int64_t ptx_unwritten(const void* address) {
  const std::lock_guard<std::mutex> lock(mutex);
  return ptx::Unwritten(address);
}
// The fault since the last call, or "".
EXPORT void ptx_take_fault(char* out, int size) {
  const std::lock_guard<std::mutex> lock(mutex);
  std::snprintf(out, static_cast<size_t>(size), "%s", fault.c_str());
  fault.clear();
}
EXPORT void ptx_set_fault(const char* message) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (fault.empty()) fault = message;
}
EXPORT const char* ptx_fault() { return fault.c_str(); }
// Parses every kernel; their number, or -1 after a fault.
EXPORT int ptx_parse_all() {
  const std::lock_guard<std::mutex> lock(mutex);
  try {
    return ptx::ParseAll();
  } catch (const ptx::Fault& found) {
    fault = found.message;
    return -1;
  }
}
// A line for each kernel of the folder that was launched: its name and how often.
EXPORT void ptx_report(const char* path) {
  const std::lock_guard<std::mutex> lock(mutex);
  std::FILE* file = std::fopen(path, "w");
  for (const auto& [name, count] : launches) {
    std::fprintf(file, "%s %lld\n", name.c_str(), static_cast<long long>(count));
  }
  std::fclose(file);
}

EXPORT void emulator_configure(int count, int runs_backwards) {
  multiprocessors = count;
  ptx::runs_backwards = runs_backwards != 0;
}
EXPORT void emulator_approximate(int error) { ptx::approximation_error = error; }
EXPORT int emulator_capture_mode_is_restored() { return capture_mode == cudaStreamCaptureModeThreadLocal; }
EXPORT int64_t emulator_take_misaligned() { return 0; }  // a fault ends the launch
EXPORT void emulator_take_launches(int64_t* counts) {
  for (int64_t* count : {&kernels, &memsets, &copies}) {
    *counts++ = *count;
    *count = 0;
  }
}
