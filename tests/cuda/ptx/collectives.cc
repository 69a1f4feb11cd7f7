// What threads do together: barriers, reductions over a warp, ldmatrix and mma.
//
// Sections are those of NVIDIA's "Parallel Thread Execution ISA", version 9.0.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "faults.h"
#include "numbers.h"
#include "parser.h"
#include "warp.h"

namespace ptx {
namespace {

// 9.7.13.12, redux.sync
template <bool kAdds>
void Reduce(Warp& warp, const Instruction& in, uint32_t lanes) {
  const Register& source = warp.at(in.from[1]);
  uint32_t total = 0;
  uint64_t undefined = 0;
  ForLanes(lanes, [&](int lane) {
    const auto value = static_cast<uint32_t>(source.value[lane]);
    total = kAdds ? total + value : std::max(total, value);
    undefined |= source.Undefined(lane) & 0xffffffff;
  });
  ForLanes(lanes, [&](int lane) { warp.at(in.to[0]).Set(lane, total, undefined ? 0xffffffff : 0); });
}

// 9.7.9.6, shfl.sync: the value of the lane whose number differs in the bits of the second operand, or is that operand.
template <bool kButterfly>
void Exchange(Warp& warp, const Instruction& in, uint32_t lanes) {
  const Register before = warp.at(in.from[1]);
  ForLanes(lanes, [&](int lane) {
    warp.Locate(lane);
    const uint64_t clamp = warp.at(in.from[3]).value[lane];
    if ((clamp & 0x1f1f) != 0x1f) Refuse("unknown", "shfl over a part of a warp");
    const int operand = static_cast<int>(warp.at(in.from[2]).value[lane] & 31);
    const int source = kButterfly ? lane ^ operand : operand;
    if (!(lanes >> source & 1)) Refuse("warp", "shfl reads lane " + std::to_string(source) + ", not in its mask");
    warp.at(in.to[0]).Set(lane, before.value[source], before.Undefined(source));
    if (in.to[1] >= 0) warp.at(in.to[1]).Set(lane, 1);
  });
}

// 9.7.14.5.15, ldmatrix.x4: lane i has the address of row i % 8 of matrix i / 8, and gets of each matrix the pair of
// elements i % 4 of row i / 4.
void LoadMatrices(Warp& warp, const Instruction& in, uint32_t) {
  uint8_t rows[kLanes][16], undefined[kLanes][16];
  const Register& address = warp.at(in.from[1]);
  for (int lane = 0; lane < kLanes; ++lane) {
    warp.CheckDefined(address.Undefined(lane) & 0xffffffff, "an address", lane);
    warp.Locate(lane);
    const uint64_t at = (address.value[lane] & 0xffffffff) + static_cast<uint64_t>(in.offset);
    warp.block().shared().Read(at, 16, rows[lane], undefined[lane]);
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    for (size_t matrix = 0; matrix < 4; ++matrix) {
      const size_t row = 8 * matrix + static_cast<size_t>(lane) / 4, column = 4 * (static_cast<size_t>(lane) % 4);
      uint32_t word, bits;
      std::memcpy(&word, &rows[row][column], sizeof(word));
      std::memcpy(&bits, &undefined[row][column], sizeof(bits));
      if (in.to[matrix] >= 0) warp.at(in.to[matrix]).Set(lane, word, bits);
    }
  }
}

// ------------------------------------------------------------ 9.7.14.5.14, mma.m16n8k32 of fp8; fragments: 9.7.14.5.10
// The manual leaves the accuracy of sums open. Here they are those of Ada, the least precise that are known: products
// of 16 columns and the sum so far are cut 13 bits below their largest exponent (tests/oracle/accumulation.py).
constexpr int kRows = 16, kColumns = 8, kDepth = 32, kTerms = 16, kSumBits = 13;

struct Element {
  double value;
  int exponent;  // subnormal codes have that of the smallest normal one
  bool is_undefined;
};

Element DecodeElement(const Format& format, uint64_t word, uint64_t undefined, int byte) {
  const double value = Decode(format, word >> (8 * byte) & 0xff);
  const int exponent = value == 0 || !std::isfinite(value) ? 0 : std::max(std::ilogb(value), format.MinExponent());
  return {value, exponent, (undefined >> (8 * byte) & 0xff) != 0};
}

double CutBelow(double x, int last) { return std::ldexp(std::trunc(std::ldexp(x, -last)), last); }

double AddProducts(double sum, const Element* a, const Element* b) {
  double exact = sum;
  int largest = sum == 0 ? std::numeric_limits<int>::min() : std::ilogb(sum);
  for (int k = 0; k < kTerms; ++k) {
    const double product = a[k].value * b[k].value;
    exact += product;
    if (product != 0) largest = std::max(largest, a[k].exponent + b[k].exponent);
  }
  if (!std::isfinite(exact)) return exact;
  double total = sum == 0 ? 0 : CutBelow(sum, largest - kSumBits);
  for (int k = 0; k < kTerms; ++k) {
    const double product = a[k].value * b[k].value;
    if (product != 0) total += CutBelow(product, largest - kSumBits);
  }
  return total == 0 ? 0 : CutBelow(total, std::ilogb(total) - kSumBits);
}

// Sources: the mask, a in 4 registers, b in 2, c in 4. The figures of the manual, with group = lane / 4, t = lane % 4:
// a[q], byte i: row group + 8 (q % 2), column 4 t + i + 16 (q / 2);  b[q], byte i: row 4 t + i + 16 q, column group;
// c[q] and d[q]: row group + 8 (q / 2), column 2 t + q % 2.
template <const Format& kA, const Format& kB>
void MultiplyMatrices(Warp& warp, const Instruction& in, uint32_t) {
  static std::array<std::array<Element, kDepth>, kRows> a;
  static std::array<std::array<Element, kDepth>, kColumns> b;
  for (int lane = 0; lane < kLanes; ++lane) {
    const auto group = static_cast<size_t>(lane) / 4, t = static_cast<size_t>(lane) % 4;
    for (size_t q = 0; q < 4; ++q) {
      const Register& source = warp.at(in.from[1 + q]);
      for (size_t i = 0; i < 4; ++i) {
        a[group + 8 * (q % 2)][4 * t + i + 16 * (q / 2)] =
            DecodeElement(kA, source.value[lane], source.Undefined(lane), static_cast<int>(i));
      }
    }
    for (size_t q = 0; q < 2; ++q) {
      const Register& source = warp.at(in.from[5 + q]);
      for (size_t i = 0; i < 4; ++i) {
        b[group][4 * t + i + 16 * q] =
            DecodeElement(kB, source.value[lane], source.Undefined(lane), static_cast<int>(i));
      }
    }
  }
  const auto is_undefined = [](const std::array<Element, kDepth>& elements) {
    return std::any_of(elements.begin(), elements.end(), [](const Element& element) { return element.is_undefined; });
  };
  for (int lane = 0; lane < kLanes; ++lane) {
    for (size_t q = 0; q < 4; ++q) {
      const auto& row = a[static_cast<size_t>(lane) / 4 + 8 * (q / 2)];
      const auto& column = b[2 * (static_cast<size_t>(lane) % 4) + q % 2];
      const Register& c = warp.at(in.from[7 + q]);
      double sum = AsFloat(c.value[lane]);
      for (size_t k = 0; k < kDepth; k += kTerms) sum = AddProducts(sum, &row[k], &column[k]);
      const bool bad = is_undefined(row) || is_undefined(column) || (c.Undefined(lane) & 0xffffffff) != 0;
      if (in.to[q] >= 0) warp.at(in.to[q]).Set(lane, AsBits(static_cast<float>(sum)), bad ? 0xffffffff : 0);
    }
  }
}

Action MultiplyAction(const std::string& opcode) {
  const std::string prefix = "mma.sync.aligned.m16n8k32.row.col.f32.";
  if (!opcode.starts_with(prefix)) return nullptr;
  const std::string types = opcode.substr(prefix.size());
  if (types == "e4m3.e4m3.f32") return MultiplyMatrices<kE4M3, kE4M3>;
  if (types == "e4m3.e5m2.f32") return MultiplyMatrices<kE4M3, kE5M2>;
  if (types == "e5m2.e4m3.f32") return MultiplyMatrices<kE5M2, kE4M3>;
  if (types == "e5m2.e5m2.f32") return MultiplyMatrices<kE5M2, kE5M2>;
  return nullptr;
}

}  // namespace

bool DecodeCollective(Parser& parser, const std::string& opcode, const std::vector<std::string>& operands,
                      Instruction* in) {
  // 9.7.13.1, bar: barrier 0 of all threads.
  if (opcode == "bar.sync" || opcode == "barrier.sync") {
    in->flow = Flow::kBarrier;
    return operands.size() == 1 && operands[0] == "0";
  }
  if (opcode == "bar.red.or.pred" || opcode == "barrier.red.or.pred") {
    in->flow = Flow::kBarrier;
    in->to[0] = parser.Result(operands.at(0));
    in->from[0] = parser.Source(operands.at(2));
    return operands.size() == 3 && operands[1] == "0";
  }
  in->flow = Flow::kCollective;
  if (opcode == "redux.sync.max.u32" || opcode == "redux.sync.add.u32") {
    in->action = opcode == "redux.sync.add.u32" ? Reduce<true> : Reduce<false>;
    in->to[0] = parser.Result(operands.at(0));
    in->from[0] = parser.Source(operands.at(2));
    in->from[1] = parser.Source(operands.at(1));
  } else if (opcode == "shfl.sync.bfly.b32" || opcode == "shfl.sync.idx.b32") {
    in->action = opcode == "shfl.sync.bfly.b32" ? Exchange<true> : Exchange<false>;
    const size_t bar = operands.at(0).find('|');  // the value, and whether it came from another lane
    in->to[0] = parser.Result(operands[0].substr(0, bar));
    if (bar != std::string::npos) in->to[1] = parser.Result(operands[0].substr(bar + 1));
    in->from[0] = parser.Source(operands.at(4));
    for (size_t i = 1; i < 4; ++i) in->from[i] = parser.Source(operands[i]);
  } else if (opcode == "ldmatrix.sync.aligned.m8n8.x4.shared.b16") {
    in->action = LoadMatrices;
    in->from[0] = parser.Constant(0xffffffff);
    parser.Address(operands.at(1), 1, in);
    return parser.Results(operands[0], in) == 4;
  } else if ((in->action = MultiplyAction(opcode))) {
    in->from[0] = parser.Constant(0xffffffff);
    return parser.Results(operands.at(0), in) == 4 && parser.Sources(operands.at(1), 1, in) == 4 &&
           parser.Sources(operands.at(2), 5, in) == 2 && parser.Sources(operands.at(3), 7, in) == 4;
  } else {
    in->flow = Flow::kNext;
    return false;
  }
  return true;
}

}  // namespace ptx
