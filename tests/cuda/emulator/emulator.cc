// The scheduler of the emulated CUDA runtime.
#include <ucontext.h>

#include <memory>
#include <vector>

#include "cuda_runtime.h"

dim3 threadIdx, blockIdx, gridDim;

namespace {

constexpr int kWarpSize = 32;
constexpr size_t kStackBytes = 256 * 1024;

enum class State { kReady, kAtBlock, kAtWarp, kDone };

struct Fiber {
  ucontext_t context;
  State state;
  unsigned int value;  // brought to, and taken from, a warp reduction
};

std::vector<Fiber> fibers;
std::vector<std::unique_ptr<char[]>> stacks;
ucontext_t scheduler;
int current = 0;
const std::function<void()>* body = nullptr;

// Set by the tests.
int multiprocessors = 132;
bool backwards = false;
int64_t misaligned = 0;
int64_t kernels = 0, memsets = 0, copies = 0;

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
    makecontext(&fibers[i].context, Enter, 0);
  }
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
    unsigned int largest = 0;
    for (int i = first; i < first + kWarpSize; ++i) largest = max(largest, fibers[i].value);
    for (int i = first; i < first + kWarpSize; ++i) {
      fibers[i].value = largest;
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

unsigned int __reduce_max_sync(unsigned int, unsigned int value) {
  const int me = current;
  fibers[me].value = value;
  Wait(State::kAtWarp);
  return fibers[me].value;
}

void CountMisaligned() { ++misaligned; }

const char* cudaGetErrorName(cudaError_t) { return "cudaErrorEmulated"; }
const char* cudaGetErrorString(cudaError_t) { return "emulated"; }

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = multiprocessors;
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* address, int value, size_t bytes, cudaStream_t) {
  ++memsets;
  std::memset(address, value, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
  ++copies;
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t RunGrid(const cudaLaunchConfig_t& config, const std::function<void()>& thread) {
  ++kernels;
  body = &thread;
  gridDim = config.gridDim;
  for (unsigned int block = 0; block < config.gridDim.x; ++block) {
    blockIdx.x = block;
    if (!RunBlock(static_cast<int>(config.blockDim.x))) return cudaErrorLaunchFailure;
  }
  return cudaSuccess;
}

extern "C" __attribute__((visibility("default"))) void emulator_configure(int count, int run_backwards) {
  multiprocessors = count;
  backwards = run_backwards != 0;
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
