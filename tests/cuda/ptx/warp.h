// A warp: 32 threads with registers of their own, which run one instruction together where they are at the same place.
//
// Lanes that are behind run first, so that lanes which parted at a branch meet again. Nothing in a kernel may depend on
// it: threads of a warp are ordered by barriers only, and memory.h finds what a barrier would have to order.
#ifndef JAXFP8_TESTS_CUDA_PTX_WARP_H_
#define JAXFP8_TESTS_CUDA_PTX_WARP_H_

#include <array>
#include <bit>
#include <cstdint>
#include <deque>
#include <vector>

#include "faults.h"
#include "memory.h"
#include "products.h"
#include "program.h"

namespace ptx {

class Block;

struct Register {
  std::array<uint64_t, kLanes> value;
  std::array<uint64_t, kLanes> undefined;  // in lanes of `undefined_lanes`: the bits that nobody wrote
  uint32_t undefined_lanes;

  uint64_t Undefined(int lane) const { return undefined_lanes >> lane & 1 ? undefined[lane] : 0; }
  void Set(int lane, uint64_t new_value, uint64_t new_undefined = 0) {
    value[lane] = new_value;
    undefined[lane] = new_undefined;
    const uint32_t bit = 1u << lane;
    undefined_lanes = new_undefined ? undefined_lanes | bit : undefined_lanes & ~bit;
  }
};

enum class State : uint8_t { kReady, kAtBarrier, kAtCollective, kAtPhase, kEnded };

// Calls `function(lane)` for the lanes of a mask.
template <class Function>
void ForLanes(uint32_t lanes, const Function& function) {
  for (; lanes != 0; lanes &= lanes - 1) function(std::countr_zero(lanes));
}

class Warp {
 public:
  Warp(Block& block, const Kernel& kernel, uint32_t first_thread, uint32_t threads);

  void Begin(uint32_t block_index, uint32_t block_size, uint32_t grid_size);
  // Runs as far as barriers let it; whether any lane moved.
  bool Run();
  // Lets lanes at the barrier go on; `any` is the result of a reduction over the block.
  void Release(bool any);
  // Names a lane that waits for others of its warp as a fault, if there is one.
  void RefuseWaiting();

  Register& at(int index) { return registers_[static_cast<size_t>(index)]; }
  Block& block() { return block_; }
  uint32_t all() const { return all_; }
  State state(int lane) const { return states_[lane]; }
  const Instruction& instruction(int lane) const { return kernel_.code[places_[lane]]; }
  // Makes `position` that of a lane.
  void Locate(int lane) const { position.thread = first_thread_ + static_cast<uint32_t>(lane); }
  std::deque<std::vector<Copy>>& copies(int lane) { return copies_[lane]; }
  Products& products() { return products_; }
  int rank() const { return static_cast<int>(first_thread_ / kLanes); }
  void CheckDefined(uint64_t undefined, const char* subject, int lane) const {
    if (undefined == 0) return;
    Locate(lane);
    Refuse("undefined", subject);
  }

 private:
  uint32_t ReadyLanes() const;
  void RunReady(uint32_t ready);
  uint32_t GuardedLanes(const Instruction& in, uint32_t lanes);
  bool RunCollectives();
  bool TryWait(const Instruction& in, int lane);
  void Wake();
  uint32_t CollectiveMask(int lane) const;

  Block& block_;
  const Kernel& kernel_;
  uint32_t first_thread_, all_;
  std::vector<Register> registers_;
  std::array<uint32_t, kLanes> places_;  // in the code
  std::array<State, kLanes> states_;
  uint32_t gave_up_ = 0;  // lanes whose try_wait has given up once
  std::array<std::deque<std::vector<Copy>>, kLanes> copies_;  // groups; the last is not committed yet
  Products products_;
};

// The launch of a block.
class Block {
 public:
  Block(const Kernel& kernel, uint32_t threads, uint32_t blocks, uint32_t dynamic_bytes,
        const std::vector<uint8_t>& parameters);

  void Run(uint32_t index);

  SharedMemory& shared() { return shared_; }
  const std::vector<uint8_t>& parameters() const { return parameters_; }
  void SetRegisters(int warp, int count, bool takes);

 private:
  void PassBarrier();
  void CheckWarpgroups();

  const Kernel& kernel_;
  uint32_t threads_, blocks_;
  const std::vector<uint8_t>& parameters_;
  SharedMemory shared_;
  std::vector<Warp> warps_;
  std::vector<int> registers_;  // of each warp's threads
};

// Whether blocks, and warps of a block, run from the last to the first.
inline bool runs_backwards = false;
// Instructions of warps that ran so far, and how many a launch may take.
inline uint64_t instructions = 0;
inline uint64_t instruction_limit = 100'000'000;

}  // namespace ptx

#endif  // JAXFP8_TESTS_CUDA_PTX_WARP_H_
