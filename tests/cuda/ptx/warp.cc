#include "warp.h"

#include <algorithm>
#include <string>

namespace ptx {

Warp::Warp(Block& block, const Kernel& kernel, uint32_t first_thread, uint32_t threads)
    : block_(block),
      kernel_(kernel),
      first_thread_(first_thread),
      all_(threads >= kLanes ? ~0u : (1u << threads) - 1),
      registers_(static_cast<size_t>(kernel.registers)) {}

void Warp::Begin(uint32_t block_index, uint32_t block_size, uint32_t grid_size) {
  for (Register& reg : registers_) {
    reg.undefined.fill(~uint64_t{0});
    reg.undefined_lanes = ~0u;
  }
  const auto set = [&](int index, auto value_of) {
    if (index < 0) return;
    for (int lane = 0; lane < kLanes; ++lane) at(index).Set(lane, value_of(static_cast<uint32_t>(lane)));
  };
  for (const auto& [index, value] : kernel_.constants) set(index, [&](uint32_t) { return value; });
  set(kernel_.thread_index, [&](uint32_t lane) { return first_thread_ + lane; });
  set(kernel_.lane_index, [](uint32_t lane) { return lane; });
  set(kernel_.block_index, [&](uint32_t) { return block_index; });
  set(kernel_.block_size, [&](uint32_t) { return block_size; });
  set(kernel_.grid_size, [&](uint32_t) { return grid_size; });
  places_.fill(0);
  for (int lane = 0; lane < kLanes; ++lane) {
    states_[lane] = all_ >> lane & 1 ? State::kReady : State::kEnded;
    copies_[lane].assign(1, {});
  }
  products_ = {};
  gave_up_ = 0;
}

uint32_t Warp::ReadyLanes() const {
  uint32_t ready = 0;
  for (int lane = 0; lane < kLanes; ++lane) ready |= static_cast<uint32_t>(states_[lane] == State::kReady) << lane;
  return ready;
}

// Whether the phase that a lane waits for has ended.
bool Warp::TryWait(const Instruction& in, int lane) {
  const Register &address = at(in.from[0]), &parity = at(in.from[1]);
  CheckDefined((address.Undefined(lane) | parity.Undefined(lane)) & 0xffffffff, "an operand of try_wait", lane);
  Locate(lane);
  return block_.shared().HasEnded(address.value[lane] & 0xffffffff, parity.value[lane] & 1);
}

void Warp::Wake() {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (states_[lane] == State::kAtPhase && TryWait(instruction(lane), lane)) states_[lane] = State::kReady;
  }
}

bool Warp::Run() {
  bool has_moved = false;
  Wake();
  do {
    while (const uint32_t ready = ReadyLanes()) {
      RunReady(ready);
      has_moved = true;
    }
  } while (RunCollectives());
  return has_moved;
}

uint32_t Warp::GuardedLanes(const Instruction& in, uint32_t lanes) {
  if (in.guard < 0) return lanes;
  const Register& guard = at(in.guard);
  uint32_t active = 0;
  ForLanes(lanes, [&](int lane) {
    CheckDefined(guard.Undefined(lane) & 1, "a predicate", lane);
    if ((guard.value[lane] & 1) != static_cast<uint64_t>(in.guard_is_negated)) active |= 1u << lane;
  });
  return active;
}

// Runs the lanes that are furthest behind, until they part, wait, or reach a place where others are ready.
void Warp::RunReady(uint32_t ready) {
  uint32_t place = ~0u, next_place = ~0u, lanes = 0;
  ForLanes(ready, [&](int lane) { place = std::min(place, places_[lane]); });
  ForLanes(ready, [&](int lane) {
    if (places_[lane] == place) {
      lanes |= 1u << lane;
    } else {
      next_place = std::min(next_place, places_[lane]);
    }
  });
  const auto leave = [&](uint32_t leaving, State state, uint32_t at) {
    ForLanes(leaving, [&](int lane) { states_[lane] = state, places_[lane] = at; });
  };
  while (place < next_place) {
    const Instruction& in = kernel_.code[place];
    position.line = in.line;
    if (++instructions > instruction_limit) Refuse("endless", "the launch takes too many instructions");
    const uint32_t active = GuardedLanes(in, lanes);
    ++place;
    if (active == 0) continue;
    const uint32_t others = lanes & ~active;
    switch (in.flow) {
      case Flow::kNext:
        in.action(*this, in, active);
        continue;
      case Flow::kBranch:
        if (others == 0) {
          place = static_cast<uint32_t>(in.target);
          continue;
        }
        leave(active, State::kReady, static_cast<uint32_t>(in.target));
        leave(others, State::kReady, place);
        return;
      case Flow::kReturn:
        leave(active, State::kEnded, place - 1);
        break;
      case Flow::kBarrier:
        leave(active, State::kAtBarrier, place - 1);
        break;
      case Flow::kCollective:
        leave(active, State::kAtCollective, place - 1);
        break;
      case Flow::kWait: {
        uint32_t waiting = 0;
        ForLanes(active, [&](int lane) {
          const bool has_ended = TryWait(in, lane);
          const uint32_t bit = 1u << lane;
          if (!has_ended && gave_up_ & bit) {
            waiting |= bit;
            return;
          }
          at(in.to[0]).Set(lane, has_ended);
          gave_up_ = has_ended ? gave_up_ & ~bit : gave_up_ | bit;
        });
        leave(waiting, State::kAtPhase, place - 1);
        if ((lanes &= ~waiting) == 0) return;
        continue;
      }
    }
    lanes = others;
    if (lanes == 0) return;
  }
  leave(lanes, State::kReady, place);
}

// The lanes for which an instruction with `.sync` waits. Faults where one of them cannot come.
uint32_t Warp::CollectiveMask(int lane) const {
  const Register& masks = registers_[static_cast<size_t>(instruction(lane).from[0])];
  CheckDefined(masks.Undefined(lane) & 0xffffffff, "a mask of lanes", lane);
  const auto mask = static_cast<uint32_t>(masks.value[lane]);
  Locate(lane);
  if (!(mask >> lane & 1)) Refuse("warp", "a lane is not in its own mask, " + Hex(mask));
  ForLanes(mask, [&](int other) {
    const std::string name = "lane " + std::to_string(other) + " of the mask";
    if (states_[other] == State::kEnded) Refuse("warp", name + " has ended");
    if (states_[other] == State::kAtBarrier) Refuse("warp", name + " waits at a barrier");
  });
  return mask;
}

bool Warp::RunCollectives() {
  bool has_moved = false;
  for (int lane = 0; lane < kLanes; ++lane) {
    if (states_[lane] != State::kAtCollective) continue;
    const Instruction& in = instruction(lane);
    position.line = in.line;
    const uint32_t mask = CollectiveMask(lane);
    bool is_complete = true;
    ForLanes(mask, [&](int other) {
      is_complete = is_complete && states_[other] == State::kAtCollective && places_[other] == places_[lane];
    });
    if (!is_complete) continue;
    ForLanes(mask, [&](int other) {
      if (CollectiveMask(other) != mask) Refuse("warp", "lanes have different masks");
    });
    in.action(*this, in, mask);
    ForLanes(mask, [&](int other) {
      states_[other] = State::kReady;
      ++places_[other];
    });
    has_moved = true;
  }
  return has_moved;
}

void Warp::RefuseWaiting() {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (states_[lane] != State::kAtCollective && states_[lane] != State::kAtPhase) continue;
    Locate(lane);
    position.line = instruction(lane).line;
    if (states_[lane] == State::kAtPhase) {
      block_.shared().RefuseToWait(at(instruction(lane).from[0]).value[lane] & 0xffffffff);
    }
    Refuse("warp", "waits for lanes that do not come");
  }
}

void Warp::Release(bool any) {
  for (int lane = 0; lane < kLanes; ++lane) {
    if (states_[lane] != State::kAtBarrier) continue;
    const Instruction& in = instruction(lane);
    if (in.to[0] >= 0) at(in.to[0]).Set(lane, any);
    states_[lane] = State::kReady;
    ++places_[lane];
  }
}

// -------------------------------------------------------------------------------------------------------------- blocks

constexpr uint32_t kRegisters = 65536;  // of a multiprocessor

Block::Block(const Kernel& kernel, uint32_t threads, uint32_t blocks, uint32_t dynamic_bytes,
             const std::vector<uint8_t>& parameters)
    : kernel_(kernel),
      threads_(threads),
      blocks_(blocks),
      parameters_(parameters),
      shared_(kernel.shared_end + dynamic_bytes) {
  for (const Variable& variable : kernel.shared) {
    if (variable.bytes == 0 && kernel.shared.size() > 1) Refuse("unknown", "two kinds of shared memory in a kernel");
    shared_.AddVariable(variable.address, variable.bytes == 0 ? static_cast<int>(dynamic_bytes) : variable.bytes);
  }
  for (uint32_t first = 0; first < threads; first += kLanes) {
    warps_.emplace_back(*this, kernel, first, threads - first);
  }
}

void Block::Run(uint32_t index) {
  epoch.block_begin = ++epoch.now;
  position.block = index;
  shared_.BeginBlock();
  registers_.assign(warps_.size(), static_cast<int>(kRegisters / threads_ / 8 * 8));
  for (Warp& warp : warps_) warp.Begin(index, threads_, blocks_);
  const size_t count = warps_.size();
  for (;;) {
    bool has_moved = false;
    for (size_t i = 0; i < count; ++i) has_moved |= warps_[runs_backwards ? count - 1 - i : i].Run();
    uint32_t ended = 0, waiting = 0;
    for (const Warp& warp : warps_) {
      ForLanes(warp.all(), [&](int lane) {
        ended += warp.state(lane) == State::kEnded;
        waiting += warp.state(lane) == State::kAtBarrier;
      });
    }
    if (ended == threads_) break;
    if (ended + waiting == threads_) {
      PassBarrier();
    } else if (!has_moved && !shared_.ArriveBox()) {
      for (Warp& warp : warps_) warp.RefuseWaiting();
    }
  }
  CheckWarpgroups();
  if (shared_.HasBoxes()) Refuse("pending", "the block ends before its copy has arrived");
  for (Warp& warp : warps_) {
    if (warp.products().IsPending()) Refuse("pending", "the warp ends before its wgmma has");
    ForLanes(warp.all(), [&](int lane) {
      for (const auto& group : warp.copies(lane)) {
        if (group.empty()) continue;
        warp.Locate(lane);
        position.line = group[0].line;
        Refuse("pending", "the thread ends before its copy has arrived");
      }
    });
  }
}

// 9.7.13.1, bar.sync and bar.red.or: all threads of the block meet at one instruction.
void Block::PassBarrier() {
  int line = -1;
  bool any = false;
  for (Warp& warp : warps_) {
    ForLanes(warp.all(), [&](int lane) {
      const Instruction& in = warp.instruction(lane);
      warp.Locate(lane);
      position.line = in.line;
      if (warp.state(lane) == State::kEnded) Refuse("barrier", "the thread has ended, others wait at a barrier");
      if (line < 0) line = in.line;
      if (in.line != line) Refuse("barrier", "another thread waits at the barrier of line " + std::to_string(line));
      const Register& predicate = warp.at(in.from[0]);
      warp.CheckDefined(predicate.Undefined(lane) & 1, "the operand of a barrier", lane);
      any |= (predicate.value[lane] & 1) != 0;
    });
  }
  CheckWarpgroups();
  ++epoch.now;
  shared_.PassBarrier();
  for (Warp& warp : warps_) warp.Release(any);
}

// 9.7.19.5: a count is a multiple of 8 from 24 to 256, and more is taken from what others have given.
void Block::SetRegisters(int warp, int count, bool takes) {
  int& registers = registers_[static_cast<size_t>(warp)];
  const bool is_count = count % 8 == 0 && count >= 24 && count <= 256;
  if (!is_count || (takes ? count < registers : count > registers)) {
    Refuse("registers", "setmaxnreg from " + std::to_string(registers) + " to " + std::to_string(count));
  }
  registers = count;
}

// 9.7.15 and 9.7.19.5: the four warps of a warpgroup run the same wgmma and setmaxnreg.
void Block::CheckWarpgroups() {
  int taken = 0;
  for (const int registers : registers_) taken += registers - static_cast<int>(kRegisters / threads_ / 8 * 8);
  if (taken > 0) Refuse("registers", "setmaxnreg waits for registers that nobody gives");
  for (size_t i = 0; i < warps_.size(); ++i) {
    if (registers_[i] != registers_[i / 4 * 4]) Refuse("warpgroup", "one of its warps has not run setmaxnreg");
    if (warps_[i].products().started == warps_[i / 4 * 4].products().started) continue;
    Refuse("warpgroup", "warp " + std::to_string(i) + " has not run as many wgmma as the others");
  }
}

}  // namespace ptx
