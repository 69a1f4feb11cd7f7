// mbarrier, cp.async.bulk.tensor and setmaxnreg.
//
// Sections are those of NVIDIA's "Parallel Thread Execution ISA", version 9.0. Copies arrive as late as they may, when no thread
// can go on without one, the latest first; or at once. A try_wait that has to wait gives up once, as the manual lets it.
#include "bulk.h"

#include <cstring>

#include "faults.h"
#include "parser.h"
#include "warp.h"

namespace ptx {
namespace {

uint32_t Me() { return position.thread + 1; }
size_t MyWarp() { return position.thread / kLanes; }

uint64_t Operand(Warp& warp, int index, int lane, uint64_t mask = 0xffffffff) {
  const Register& source = warp.at(index);
  warp.CheckDefined(source.Undefined(lane) & mask, "an operand of mbarrier or cp.async.bulk", lane);
  warp.Locate(lane);
  return source.value[lane] & mask;
}

}  // namespace

// 9.7.13.15.9, mbarrier.init
void SharedMemory::MakeBarrier(uint64_t address, uint32_t threads) {
  Check(address, 8, "makes a barrier in");
  if (barriers_.contains(address)) Refuse("barrier", "a barrier is made twice");
  barriers_[address] = {threads, threads, 0, 0, Me(), shows_[Me()].count, epoch.now, {}, {}};
}

// Of threads beside the one that made it, after a barrier of the block.
Barrier& SharedMemory::BarrierAt(uint64_t address) {
  const auto at = barriers_.find(address);
  if (at == barriers_.end()) Refuse("barrier", "there is no mbarrier at " + Hex(address));
  if (at->second.maker != Me() && at->second.epoch == epoch.now) {
    Refuse("race", "another thread makes the mbarrier at " + Hex(address));
  }
  return at->second;
}

// 9.7.13.15.5: a phase ends with the last of its threads and bytes.
void SharedMemory::EndPhase(uint64_t address, Barrier& barrier) {
  if (barrier.missing > 0) return;
  if (barrier.bytes < 0) Refuse("count", std::to_string(-barrier.bytes) + " bytes more than the phase expects");
  if (barrier.bytes > 0) return;
  for (const BoxCopy& copy : boxes_) {
    if (copy.barrier == address) Refuse("count", "the phase ends while a copy is under way");
  }
  ++barrier.phase;
  ++epoch.now;  // to plain accesses a barrier of the block
  barrier.missing = barrier.threads;
  barrier.ended.Add(barrier.arriving);
  barrier.arriving = {};
}

// 9.7.13.15.13, mbarrier.arrive, .release at .cta
void SharedMemory::ArriveAt(uint64_t address, uint32_t bytes) {
  Barrier& barrier = BarrierAt(address);
  if (barrier.missing == 0) Refuse("count", "more threads arrive than the mbarrier was made for");
  Past& past = pasts_[MyWarp()];
  barrier.arriving.Add(past);
  ++past.arrivals[MyWarp()];
  barrier.bytes += bytes;
  --barrier.missing;
  EndPhase(address, barrier);
}

// 9.7.13.15.16, mbarrier.try_wait.parity, .acquire at .cta
bool SharedMemory::HasEnded(uint64_t address, uint64_t parity) {
  const Barrier& barrier = BarrierAt(address);
  if (barrier.phase % 2 == parity) return false;
  Past& past = pasts_[MyWarp()];
  past.Add(barrier.ended);
  past.phases[address] = barrier.phase;
  return true;
}

void SharedMemory::RefuseToWait(uint64_t address) {
  const Barrier& barrier = BarrierAt(address);
  const std::string rest = std::to_string(barrier.missing) + " threads and " + std::to_string(barrier.bytes) + " bytes";
  Refuse(barrier.missing == 0 ? "count" : "phase", "waits for a phase that never ends: " + rest + " do not come");
}

// bar.sync orders all threads of the block.
void SharedMemory::PassBarrier() {
  Past all;
  for (const Past& past : pasts_) all.Add(past);
  pasts_.fill(all);
  for (size_t i = 0; i < kMostWarps; ++i) ++pasts_[i].arrivals[i];
}

// The current thread accesses chunks of 16 bytes, which boxes may have brought.
void SharedMemory::Note(uint64_t address, uint32_t bytes) {
  if (barriers_.empty()) return;
  const Past& past = pasts_[MyWarp()];
  for (uint64_t at = address / 16; at <= (address + bytes - 1) / 16; ++at) {
    Chunk& chunk = chunks_[at];
    if (past.PhasesOf(chunk.barrier) < chunk.phases) {
      Refuse("phase", "accesses what a copy brings before the thread has waited for its barrier");
    }
    chunk.accesses[MyWarp()] = past.arrivals[MyWarp()];
  }
}

void SharedMemory::ReadLater(uint64_t address) {
  Check(address, 16, "reads");
  Note(address, 16);
  chunks_[address / 16].accesses[MyWarp()] = ~0u;
}

// 9.7.9.27.1.2, cp.async.bulk.tensor; 5.5.7: the target's alignment.
void SharedMemory::Begin(const BoxCopy& copy) {
  Barrier& barrier = BarrierAt(copy.barrier);
  const Shows& shows = shows_[barrier.maker];
  if (shows.count == barrier.shows) Refuse("proxy", "the mbarrier was made without fence.proxy.async");
  if (copy.target % 1024 != 0) Refuse("misaligned", "a swizzled box at " + Hex(copy.target));
  const Past& past = pasts_[MyWarp()];
  for (uint64_t at = copy.target; at < copy.target + copy.Bytes(); at += 16) {
    Check(at, 16, "copies to");
    Chunk& chunk = chunks_[at / 16];
    bool is_free = past.PhasesOf(chunk.barrier) >= chunk.phases && !barriers_.contains(at) && !barriers_.contains(at + 8);
    for (size_t i = 0; i < kMostWarps; ++i) is_free &= i == MyWarp() || chunk.accesses[i] <= past.arrivals[i];
    if (!is_free) Refuse("overwrite", "copies to shared memory that may still be read");
    chunk.barrier = copy.barrier;
    chunk.phases = barrier.phase + 1;
    for (uint64_t i = at; i < at + 16; ++i) bytes_[i].copier = Me();
  }
  boxes_.push_back(copy);
  if (runs_backwards) ArriveBox();
}

// The latest box, if one is under way.
bool SharedMemory::ArriveBox() {
  if (boxes_.empty()) return false;
  const BoxCopy copy = boxes_.back();
  boxes_.pop_back();
  position.thread = copy.thread;
  position.line = copy.line;
  const TensorMap& map = copy.map;
  uint64_t linear = copy.target;
  for (int64_t z = copy.first[2]; z < copy.first[2] + map.box[2]; ++z) {
    for (int64_t y = copy.first[1]; y < copy.first[1] + map.box[1]; ++y) {
      for (int64_t x = copy.first[0]; x < copy.first[0] + map.box[0]; ++x, ++linear) {
        const uint64_t to = linear ^ (linear >> 7 & 7) << 4;
        const int64_t place[] = {x, y, z};
        bool is_inside = true;  // zeros elsewhere
        for (size_t i = 0; i < 3; ++i) is_inside &= place[i] >= 0 && place[i] < static_cast<int64_t>(map.sizes[i]);
        bytes_[to] = {};
        bytes_[to].is_of_box = true;
        bytes_[to].undefined = data_[to] = 0;
        if (!is_inside) continue;
        const uint64_t from = map.base + static_cast<uint64_t>(x) + static_cast<uint64_t>(y) * map.strides[0] +
                              static_cast<uint64_t>(z) * map.strides[1];
        ReadGlobal(from, 1, false, &data_[to], &bytes_[to].undefined);
      }
    }
  }
  Barrier& barrier = barriers_.at(copy.barrier);
  barrier.bytes -= copy.Bytes();
  EndPhase(copy.barrier, barrier);
  return true;
}

namespace {

void MakeBarrier(Warp& warp, const Instruction& in, uint32_t lanes) {
  ForLanes(lanes, [&](int lane) {
    const auto threads = static_cast<uint32_t>(Operand(warp, in.from[1], lane));
    warp.block().shared().MakeBarrier(Operand(warp, in.from[0], lane), threads);
  });
}

void Arrive(Warp& warp, const Instruction& in, uint32_t lanes) {
  ForLanes(lanes, [&](int lane) {
    const auto bytes = static_cast<uint32_t>(Operand(warp, in.from[1], lane));
    warp.block().shared().ArriveAt(Operand(warp, in.from[0], lane), bytes);
  });
}

void CopyBox(Warp& warp, const Instruction& in, uint32_t lanes) {
  ForLanes(lanes, [&](int lane) {
    BoxCopy copy = {};
    const uint64_t map = Operand(warp, in.from[1], lane, ~uint64_t{0}) - kParameterBase;
    const std::vector<uint8_t>& parameters = warp.block().parameters();
    if (map + 128 > parameters.size() || map % 64 != 0) Refuse("outside", "a tensor map that is no parameter");
    std::memcpy(&copy.map, parameters.data() + map, sizeof(copy.map));
    if (copy.map.mark != TensorMap::kMark) Refuse("undefined", "a tensor map that cuTensorMapEncodeTiled did not make");
    copy.target = Operand(warp, in.from[0], lane);
    for (size_t i = 0; i < 3; ++i) {
      copy.first[i] = static_cast<int32_t>(static_cast<uint32_t>(Operand(warp, in.from[2 + i], lane)));
    }
    copy.barrier = Operand(warp, in.from[5], lane);
    copy.thread = position.thread;
    copy.line = in.line;
    warp.block().shared().Begin(copy);
  });
}

// 9.7.19.5, setmaxnreg
template <bool kTakes>
void SetRegisters(Warp& warp, const Instruction& in, uint32_t) {
  warp.block().SetRegisters(warp.rank(), static_cast<int>(in.offset), kTakes);
}

// "[a, {b, c}]" as "a", "{b, c}".
std::vector<std::string> Inside(const std::string& operand) {
  return SplitOperands(std::string_view(operand).substr(1, operand.size() - 2));
}

}  // namespace

bool DecodeBulk(Parser& parser, const std::string& opcode, const std::vector<std::string>& operands, Instruction* in) {
  if (opcode == "mbarrier.init.shared::cta.b64") {
    in->action = MakeBarrier;
    parser.Address(operands.at(0), 0, in);
    in->from[1] = parser.Source(operands.at(1));
  } else if (opcode == "mbarrier.arrive.shared::cta.b64" || opcode == "mbarrier.arrive.expect_tx.shared::cta.b64") {
    in->action = Arrive;
    parser.Address(operands.at(1), 0, in);
    if (operands.size() == 3) in->from[1] = parser.Source(operands[2]);
    return operands[0] == "_";
  } else if (opcode == "mbarrier.try_wait.parity.shared::cta.b64") {
    in->flow = Flow::kWait;
    in->to[0] = parser.Result(operands.at(0));
    parser.Address(operands.at(1), 0, in);
    in->from[1] = parser.Source(operands.at(2));
  } else if (opcode == "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes") {
    in->action = CopyBox;
    parser.Address(operands.at(2), 5, in);
    parser.Address(operands.at(0), 0, in);
    const std::vector<std::string> source = Inside(operands.at(1));
    in->from[1] = parser.Source(source.at(0));
    return parser.Sources(source.at(1), 2, in) == 3;
  } else if (opcode == "setmaxnreg.dec.sync.aligned.u32" || opcode == "setmaxnreg.inc.sync.aligned.u32") {
    in->flow = Flow::kCollective;
    in->from[0] = parser.Constant(0xffffffff);
    in->action = opcode[11] == 'i' ? SetRegisters<true> : SetRegisters<false>;
    in->offset = std::stoll(operands.at(0));
  } else {
    return false;
  }
  return in->action == SetRegisters<true> || in->action == SetRegisters<false> || in->offset == 0;
}

}  // namespace ptx
