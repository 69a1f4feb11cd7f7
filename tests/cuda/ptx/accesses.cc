// Loads, stores, atomic operations and asynchronous copies.
//
// Sections are those of NVIDIA's "Parallel Thread Execution ISA", version 9.0.
#include <algorithm>
#include <cstring>
#include <sstream>

#include "faults.h"
#include "parser.h"
#include "warp.h"

namespace ptx {
namespace {

constexpr uint32_t kMostBytes = 16;

uint64_t AddressOf(Warp& warp, const Instruction& in, int lane, uint64_t mask) {
  const Register& base = warp.at(in.from[0]);
  warp.CheckDefined(base.Undefined(lane) & mask, "an address", lane);
  warp.Locate(lane);
  return (base.value[lane] & mask) + static_cast<uint64_t>(in.offset);
}
constexpr uint64_t kGenericMask = ~uint64_t{0}, kSharedMask = 0xffffffff;

// What was read becomes registers: integers are extended to the width of theirs (9.7.9.8, ld).
void Deposit(Warp& warp, const Instruction& in, int lane, const uint8_t* data, const uint8_t* undefined) {
  const int bytes = in.bits / 8;
  for (int i = 0; i < in.elements; ++i) {
    uint64_t value = 0, bits = 0;
    std::memcpy(&value, data + i * bytes, static_cast<size_t>(bytes));
    std::memcpy(&bits, undefined + i * bytes, static_cast<size_t>(bytes));
    if (in.is_signed && in.bits < 32) {
      const int shift = 32 - in.bits;
      value = static_cast<uint32_t>(static_cast<int32_t>(static_cast<uint32_t>(value) << shift) >> shift);
      bits = bits ? 0xffffffff : 0;
    }
    const int to = in.to[static_cast<size_t>(i)];
    if (to >= 0) warp.at(to).Set(lane, value, bits);
  }
}

uint32_t BytesOf(const Instruction& in) { return static_cast<uint32_t>(in.bits / 8 * in.elements); }

void LoadGlobal(Warp& warp, const Instruction& in, uint32_t lanes) {
  ForLanes(lanes, [&](int lane) {
    uint8_t data[kMostBytes], undefined[kMostBytes];
    ReadGlobal(AddressOf(warp, in, lane, kGenericMask), BytesOf(in), in.is_non_coherent, data, undefined);
    Deposit(warp, in, lane, data, undefined);
  });
}

void LoadShared(Warp& warp, const Instruction& in, uint32_t lanes) {
  ForLanes(lanes, [&](int lane) {
    uint8_t data[kMostBytes], undefined[kMostBytes];
    warp.block().shared().Read(AddressOf(warp, in, lane, kSharedMask), BytesOf(in), data, undefined);
    Deposit(warp, in, lane, data, undefined);
  });
}

void LoadParameter(Warp& warp, const Instruction& in, uint32_t lanes) {
  const std::vector<uint8_t>& parameters = warp.block().parameters();
  const uint8_t undefined[kMostBytes] = {};
  ForLanes(lanes, [&](int lane) {
    const uint64_t at = AddressOf(warp, in, lane, kGenericMask) - kParameterBase;
    const bool is_inside = at < parameters.size() && at + BytesOf(in) <= parameters.size();
    if (!is_inside) Refuse("outside", "reads beyond the parameters");
    if (at % BytesOf(in) != 0) Refuse("misaligned", "byte " + std::to_string(at) + " of the parameters");
    Deposit(warp, in, lane, parameters.data() + at, undefined);
  });
}

// The elements that a lane stores.
void Collect(Warp& warp, const Instruction& in, int lane, uint8_t* data, uint8_t* undefined) {
  const auto bytes = static_cast<size_t>(in.bits / 8);
  for (size_t i = 0; i < static_cast<size_t>(in.elements); ++i) {
    const Register& source = warp.at(in.from[1 + i]);
    const uint64_t bits = source.Undefined(lane);
    std::memcpy(data + i * bytes, &source.value[lane], bytes);
    std::memcpy(undefined + i * bytes, &bits, bytes);
  }
}

void StoreGlobal(Warp& warp, const Instruction& in, uint32_t lanes) {
  ForLanes(lanes, [&](int lane) {
    uint8_t data[kMostBytes], undefined[kMostBytes];
    Collect(warp, in, lane, data, undefined);
    const uint64_t address = AddressOf(warp, in, lane, kGenericMask);
    if (std::any_of(undefined, undefined + BytesOf(in), [](uint8_t bits) { return bits != 0; })) {
      Refuse("undefined", "stores to global memory bits that nobody wrote");
    }
    WriteGlobal(address, BytesOf(in), data);
  });
}

void StoreShared(Warp& warp, const Instruction& in, uint32_t lanes) {
  ForLanes(lanes, [&](int lane) {
    uint8_t data[kMostBytes], undefined[kMostBytes];
    Collect(warp, in, lane, data, undefined);
    warp.block().shared().Write(AddressOf(warp, in, lane, kSharedMask), BytesOf(in), data, undefined);
  });
}

// 9.7.13.5 and 9.7.13.6, atom and red
void AtomicMax(Warp& warp, const Instruction& in, uint32_t lanes) {
  ForLanes(lanes, [&](int lane) {
    const Register& source = warp.at(in.from[1]);
    warp.CheckDefined(source.Undefined(lane) & 0xffffffff, "the operand of an atomic operation", lane);
    const uint64_t address = AddressOf(warp, in, lane, kGenericMask);
    const uint32_t before = AtomicMaxGlobal(address, static_cast<uint32_t>(source.value[lane]));
    if (in.to[0] >= 0) warp.at(in.to[0]).Set(lane, before);
  });
}

// 9.7.9.25.3.1, cp.async [shared], [global], 16, count: the first `count` bytes, then zeros; [shared], [global], 4: 4 bytes.
void CopyAsync(Warp& warp, const Instruction& in, uint32_t lanes) {
  ForLanes(lanes, [&](int lane) {
    const Register &target = warp.at(in.from[1]), &count = warp.at(in.from[2]);
    warp.CheckDefined((target.Undefined(lane) | count.Undefined(lane)) & 0xffffffff, "an operand of cp.async", lane);
    const uint64_t source = AddressOf(warp, in, lane, kGenericMask);
    const uint32_t bytes = static_cast<uint32_t>(in.bits) / 8;
    const Copy copy = {target.value[lane] & kSharedMask, source, bytes, static_cast<uint32_t>(count.value[lane]), in.line};
    if (copy.count > bytes) {
      Refuse("undefined", "cp.async of " + std::to_string(copy.count) + " of " + std::to_string(bytes) + " bytes");
    }
    warp.block().shared().Begin(copy);
    warp.copies(lane).back().push_back(copy);
  });
}

void CommitCopies(Warp& warp, const Instruction&, uint32_t lanes) {
  ForLanes(lanes, [&](int lane) { warp.copies(lane).emplace_back(); });
}

// cp.async.wait_group n: until at most the n latest groups are under way.
void WaitForCopies(Warp& warp, const Instruction& in, uint32_t lanes) {
  ForLanes(lanes, [&](int lane) {
    auto& groups = warp.copies(lane);
    warp.Locate(lane);
    for (; groups.size() > static_cast<size_t>(in.offset) + 1; groups.pop_front()) {
      for (const Copy& copy : groups.front()) warp.block().shared().Arrive(copy);
    }
  });
}

std::vector<std::string> Parts(const std::string& opcode) {
  std::vector<std::string> parts;
  std::istringstream in(opcode);
  for (std::string part; std::getline(in, part, '.');) parts.push_back(part);
  return parts;
}

// ld and st, with one space, `.nc` where it is allowed, and a vector of 2 or 4.
bool DecodeLoadOrStore(Parser& parser, const std::string& opcode, const std::vector<std::string>& operands,
                       Instruction* in) {
  const std::vector<std::string> parts = Parts(opcode);
  const bool loads = parts[0] == "ld";
  if ((!loads && parts[0] != "st") || operands.size() != 2) return false;
  size_t next = 1;
  const auto take = [&](const char* part) {
    const bool is_next = next + 1 < parts.size() && parts[next] == part;
    next += is_next;
    return is_next;
  };
  if (take("global")) {
    in->is_non_coherent = loads && take("nc");
    in->action = loads ? LoadGlobal : StoreGlobal;
  } else if (take("shared")) {
    in->action = loads ? LoadShared : StoreShared;
  } else if (loads && take("param")) {
    in->action = LoadParameter;
  } else {
    return false;
  }
  const int elements = take("v2") ? 2 : take("v4") ? 4 : 1;
  if (next + 1 != parts.size()) return false;
  in->bits = BitsOf(parts.back());
  in->is_signed = parts.back()[0] == 's';
  parser.Address(operands[loads ? 1 : 0], 0, in);
  in->elements = loads ? parser.Results(operands[0], in) : parser.Sources(operands[1], 1, in);
  return in->elements == elements;
}

}  // namespace

bool DecodeAccess(Parser& parser, const std::string& opcode, const std::vector<std::string>& operands,
                  Instruction* in) {
  if (opcode == "atom.global.max.u32" || opcode == "red.global.max.u32") {
    const bool has_result = opcode[0] == 'a';
    in->action = AtomicMax;
    if (has_result) in->to[0] = parser.Result(operands.at(0));
    parser.Address(operands.at(has_result), 0, in);
    in->from[1] = parser.Source(operands.at(has_result + 1));
  } else if ((opcode == "cp.async.cg.shared.global" && operands.size() == 4 && operands[2] == "16") ||
             (opcode == "cp.async.ca.shared.global" && operands.size() == 3 && operands[2] == "4")) {
    in->action = CopyAsync;
    in->bits = 8 * std::stoi(operands[2]);
    parser.Address(operands[0], 1, in);
    if (in->offset != 0) return false;
    parser.Address(operands[1], 0, in);
    in->from[2] = parser.Source(operands.back());
  } else if (opcode == "fence.proxy.async.shared::cta") {
    in->action = [](Warp& warp, const Instruction&, uint32_t lanes) {
      ForLanes(lanes, [&](int lane) {
        warp.Locate(lane);
        warp.block().shared().Show();
      });
    };
  } else if (opcode == "cp.async.commit_group") {
    in->action = CommitCopies;
  } else if (opcode == "cp.async.wait_group") {
    in->action = WaitForCopies;
    in->offset = std::stoll(operands.at(0));
  } else {
    return DecodeLoadOrStore(parser, opcode, operands, in);
  }
  return true;
}

}  // namespace ptx
