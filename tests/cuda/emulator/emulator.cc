// The scheduler of the emulated CUDA runtime.
#include <ucontext.h>

#include <cfenv>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "cuda/kernels/ragged_matmul.h"
#include "cuda_runtime.h"

dim3 threadIdx, blockIdx, gridDim;

namespace {

constexpr int kWarpSize = 32;
constexpr size_t kStackBytes = 256 * 1024;

enum class State { kReady, kAtBlock, kAtWarp, kDone };

struct Copy {
  void* target;
  const void* source;
  int bytes;
  int count;
};

struct Fiber {
  ucontext_t context;
  State state;
  unsigned int value;  // brought to, and taken from, an exchange of the warp
  int from;            // the lane of the warp whose value is wanted; -1: the largest of all
  const void* shared;  // with the warp
  std::deque<std::vector<Copy>> copies;  // in groups; the last is not ended yet
};

std::vector<Fiber> fibers;
std::vector<std::unique_ptr<char[]>> stacks;
ucontext_t scheduler;
int current = 0;
const std::function<void()>* body = nullptr;

// Set by the tests.
int multiprocessors = 132;
int capability = 8;  // its first number
bool backwards = false;
int error_of_exp2 = 0;
int64_t misaligned = 0;
int64_t kernels = 0, memsets = 0, copies = 0;
thread_local cudaStreamCaptureMode capture_mode = cudaStreamCaptureModeThreadLocal;

// What a call returns that may be the first use of the runtime or of a kernel.
cudaError_t FirstUse() {
  return capture_mode == cudaStreamCaptureModeRelaxed ? cudaSuccess : cudaErrorStreamCaptureUnsupported;
}

void Enter() {
  (*body)();
  fibers[current].state = State::kDone;
  swapcontext(&fibers[current].context, &scheduler);
}

void Wait(State state) {
  fibers[current].state = state;
  swapcontext(&fibers[current].context, &scheduler);
}

void Start(int threads) {
  fibers.resize(threads);
  while (static_cast<int>(stacks.size()) < threads) stacks.emplace_back(new char[kStackBytes]);
  for (int i = 0; i < threads; ++i) {
    getcontext(&fibers[i].context);
    fibers[i].context.uc_stack.ss_sp = stacks[i].get();
    fibers[i].context.uc_stack.ss_size = kStackBytes;
    fibers[i].context.uc_link = nullptr;
    fibers[i].state = State::kReady;
    fibers[i].copies.assign(1, {});
    makecontext(&fibers[i].context, Enter, 0);
  }
}

void Perform(const Copy& copy) {
  std::memset(copy.target, 0, copy.bytes);
  std::memcpy(copy.target, copy.source, copy.count);
}

bool All(int first, int last, State state) {
  for (int i = first; i < last; ++i) {
    if (fibers[i].state != state) return false;
  }
  return true;
}

// Runs a warp until it ends or waits for the block: each as far ahead of the others as it can get.
void RunWarp(int first) {
  for (;;) {
    for (int i = 0; i < kWarpSize; ++i) {
      current = first + (backwards ? kWarpSize - 1 - i : i);
      if (fibers[current].state != State::kReady) continue;
      threadIdx.x = static_cast<unsigned int>(current);
      swapcontext(&scheduler, &fibers[current].context);
    }
    if (!All(first, first + kWarpSize, State::kAtWarp)) return;
    unsigned int values[kWarpSize], largest = 0;
    for (int i = 0; i < kWarpSize; ++i) {
      values[i] = fibers[first + i].value;
      largest = max(largest, values[i]);
    }
    for (int i = first; i < first + kWarpSize; ++i) {
      fibers[i].value = fibers[i].from < 0 ? largest : values[fibers[i].from];
      fibers[i].state = State::kReady;
    }
  }
}

bool RunBlock(int threads) {
  Start(threads);
  while (!All(0, threads, State::kDone)) {
    for (int i = 0; i < threads; i += kWarpSize) RunWarp(backwards ? threads - kWarpSize - i : i);
    if (All(0, threads, State::kDone)) break;
    // A device would hang here: some threads wait for others that have ended or wait elsewhere.
    if (!All(0, threads, State::kAtBlock)) return false;
    for (Fiber& fiber : fibers) fiber.state = State::kReady;
  }
  return true;
}

}  // namespace

void __syncthreads() { Wait(State::kAtBlock); }

int __syncthreads_or(int predicate) {
  static int any = 0;
  any |= predicate;
  __syncthreads();
  const int result = any;
  __syncthreads();
  any = 0;
  __syncthreads();  // before a thread comes here again
  return result != 0;
}

namespace {

unsigned int Exchange(unsigned int value, int from) {
  const int me = current;
  fibers[me].value = value;
  fibers[me].from = from;
  Wait(State::kAtWarp);
  return fibers[me].value;
}

}  // namespace

unsigned int __reduce_max_sync(unsigned int, unsigned int value) { return Exchange(value, -1); }

unsigned int __reduce_add_sync(unsigned int, unsigned int value) {
  const void* all[kWarpSize];
  WarpShare(&value, all);
  unsigned int sum = 0;
  for (const void* of_lane : all) sum += *static_cast<const unsigned int*>(of_lane);
  WarpSync();  // `value` of every lane is read by all
  return sum;
}

unsigned int __shfl_xor_sync(unsigned int, unsigned int value, int lanes) {
  return Exchange(value, current % kWarpSize ^ lanes);
}

unsigned int __shfl_sync(unsigned int, unsigned int value, int lane) { return Exchange(value, lane); }

float __shfl_xor_sync(unsigned int mask, float value, int lanes) {
  unsigned int bits;
  std::memcpy(&bits, &value, sizeof(bits));
  bits = __shfl_xor_sync(mask, bits, lanes);
  std::memcpy(&value, &bits, sizeof(bits));
  return value;
}

void WarpShare(const void* mine, const void* (&all)[32]) {
  const int first = current / kWarpSize * kWarpSize;
  fibers[current].shared = mine;
  fibers[current].from = -1;
  Wait(State::kAtWarp);
  for (int i = 0; i < kWarpSize; ++i) all[i] = fibers[first + i].shared;
}

void WarpSync() {
  fibers[current].from = -1;
  Wait(State::kAtWarp);
}

void StartCopy(void* target, const void* source, int bytes, int count) {
  const Copy copy = {target, source, bytes, count};
  if (backwards) {
    fibers[current].copies.back().push_back(copy);
  } else {
    Perform(copy);
  }
}

void EndCopyGroup() { fibers[current].copies.emplace_back(); }

void WaitForCopyGroups(int pending) {
  std::deque<std::vector<Copy>>& copies = fibers[current].copies;
  while (static_cast<int>(copies.size()) > pending + 1) {
    for (const Copy& copy : copies.front()) Perform(copy);
    copies.pop_front();
  }
}

void CountMisaligned() { ++misaligned; }

int ErrorOfExp2() { return error_of_exp2; }

const char* cudaGetErrorName(cudaError_t) { return "cudaErrorEmulated"; }
const char* cudaGetErrorString(cudaError_t) { return "emulated"; }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return FirstUse();
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int) {
  *value = attribute == cudaDevAttrComputeCapabilityMajor ? capability : multiprocessors;
  return FirstUse();
}

cudaError_t cudaFuncSetAttribute(const void*, cudaFuncAttribute, int) { return FirstUse(); }

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode* mode) {
  std::swap(*mode, capture_mode);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t) {
  ++memsets;
  std::memset(address, value, bytes);
  return FirstUse();
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  ++copies;
  std::memcpy(to, from, bytes);
  return FirstUse();
}

cudaError_t RunGrid(const cudaLaunchConfig_t& config, const std::function<void()>& thread) {
  static std::mutex one_at_a_time;  // the devices of a mesh launch at once
  const std::lock_guard<std::mutex> lock(one_at_a_time);
  if (FirstUse() != cudaSuccess) return FirstUse();
  ++kernels;
  body = &thread;
  gridDim = config.gridDim;
  std::fenv_t environment;  // XLA's threads flush subnormal numbers, a device does not
  std::fegetenv(&environment);
  std::fesetenv(FE_DFL_ENV);
  bool runs = true;
  for (unsigned int block = 0; block < config.gridDim.x && runs; ++block) {
    blockIdx.x = block;
    runs = RunBlock(static_cast<int>(config.blockDim.x));
  }
  std::fesetenv(&environment);
  return runs ? cudaSuccess : cudaErrorLaunchFailure;
}

extern "C" __attribute__((visibility("default"))) void emulator_configure(int count, int run_backwards) {
  multiprocessors = count;
  backwards = run_backwards != 0;
}

extern "C" __attribute__((visibility("default"))) void emulator_be_hopper(int is_hopper) {
  capability = is_hopper ? 9 : 8;
}

extern "C" __attribute__((visibility("default"))) void emulator_approximate(int error) { error_of_exp2 = error; }

// Whether the calling thread has the capture mode that it had in the beginning.
extern "C" __attribute__((visibility("default"))) int emulator_capture_mode_is_restored() {
  return capture_mode == cudaStreamCaptureModeThreadLocal;
}

// Misaligned accesses since the last call.
extern "C" __attribute__((visibility("default"))) int64_t emulator_take_misaligned() {
  const int64_t count = misaligned;
  misaligned = 0;
  return count;
}

// What was put on streams since the last call: kernels, memsets, copies.
extern "C" __attribute__((visibility("default"))) void emulator_take_launches(int64_t* counts) {
  for (int64_t* count : {&kernels, &memsets, &copies}) {
    *counts++ = *count;
    *count = 0;
  }
}

// Of Hopper's copy engine there is no emulation.
cudaError_t jaxfp8::cuda::LaunchRaggedTma(const RaggedMatmulParams&, cudaStream_t) { return cudaErrorNotSupported; }
