// wgmma: products of FP8 matrices in shared memory, which run beside the warps of a warpgroup.
//
// Sections are those of NVIDIA's "Parallel Thread Execution ISA", version 9.0: wgmma.mma_async is 9.7.15.5.2, its fence,
// commit_group and wait_group are 9.7.15.7.1 to 9.7.15.7.3. In one order of the warps a product is made when its group is
// committed, in the other when its warp waits for it: both are allowed.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <limits>

#include "faults.h"
#include "parser.h"
#include "warp.h"

namespace ptx {
namespace {

constexpr int kDepth = 32, kRows = 16;  // of a warp
constexpr int kSumBits = 13;

// A code as a product reads it: value = significand * 2^exponent. Subnormal codes have the smallest exponent.
struct Element {
  int significand = 0, exponent = 0;
  bool is_undefined = false, is_special = false;
  double value = 0;
};

Element ElementOf(const Format& format, uint32_t code) {
  Element element;
  element.value = Decode(format, code);
  element.is_special = !std::isfinite(element.value);
  if (element.value == 0 || element.is_special) return element;
  const int exponent = std::max(std::ilogb(element.value), format.MinExponent());
  element.exponent = exponent - format.mantissa_bits;
  element.significand = static_cast<int>(std::ldexp(element.value, -element.exponent));
  return element;
}

const std::array<Element, 256>& Table(const Format& format) {
  static std::array<std::array<Element, 256>, 2> tables;
  std::array<Element, 256>& table = tables[&format == &kE5M2];
  if (table[1].significand == 0) {  // the smallest subnormal code
    for (uint32_t code = 0; code < 256; ++code) table[code] = ElementOf(format, code);
  }
  return table;
}

int64_t CutShift(int64_t value, int places) {  // value * 2^places, towards zero
  if (places >= 0) return value << places;
  return places < -62 ? 0 : (value < 0 ? -(-value >> -places) : value >> -places);
}

// The sum so far and 32 products, cut 13 bits below their largest exponent (tests/oracle/accumulation.py); the result too.
float Add(float sum, const Element* a, const Element* b, int format_bits) {
  int largest = sum == 0 ? std::numeric_limits<int>::min() : std::ilogb(sum);
  double special = sum;
  bool is_special = !std::isfinite(sum);
  for (int k = 0; k < kDepth; ++k) {
    is_special |= a[k].is_special || b[k].is_special;
    special += a[k].value * b[k].value;
    if (a[k].significand && b[k].significand) {
      largest = std::max(largest, a[k].exponent + b[k].exponent + format_bits);
    }
  }
  if (is_special) return static_cast<float>(special);
  if (largest == std::numeric_limits<int>::min()) return 0;
  const int last = largest - kSumBits;
  int64_t total = static_cast<int64_t>(std::trunc(std::ldexp(static_cast<double>(sum), -last)));
  for (int k = 0; k < kDepth; ++k) {
    total += CutShift(int64_t{a[k].significand} * b[k].significand, a[k].exponent + b[k].exponent - last);
  }
  if (total == 0) return 0;
  const int excess = static_cast<int>(std::bit_width(static_cast<uint64_t>(std::llabs(total)))) - 1 - kSumBits;
  if (excess > 0) total = CutShift(CutShift(total, -excess), excess);
  return static_cast<float>(std::ldexp(static_cast<double>(total), last));
}

// 9.7.15.5.1.2.2, matrix descriptors, for rows of 128 bytes with the swizzle of 128: where 16 bytes of `row` are.
uint64_t ChunkAddress(uint64_t descriptor, int row, int chunk) {
  const uint64_t start = (descriptor & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 62 != 1 || (descriptor >> 49 & 7) != 0) Refuse("unknown", "matrix descriptor " + Hex(descriptor));
  const uint64_t linear = start + static_cast<uint64_t>(row / 8) * stride + static_cast<uint64_t>(row % 8 * 128 + chunk * 16);
  return linear ^ (linear >> 7 & 7) << 4;
}

std::array<Element, 16> ReadChunk(Warp& warp, uint64_t descriptor, int row, int chunk, const Format& format) {
  uint8_t data[16], undefined[16];
  warp.block().shared().ReadByTensorCores(ChunkAddress(descriptor, row, chunk), data, undefined);
  std::array<Element, 16> elements;
  const auto& table = Table(format);
  for (size_t i = 0; i < 16; ++i) {
    elements[i] = table[data[i]];
    elements[i].is_undefined = undefined[i] != 0;
  }
  return elements;
}

std::vector<std::array<Element, kDepth>> ReadRows(Warp& warp, uint64_t descriptor, int first, int count,
                                                  const Format& format) {
  std::vector<std::array<Element, kDepth>> rows(static_cast<size_t>(count));
  for (int row = 0; row < count; ++row) {
    for (int chunk = 0; chunk < kDepth / 16; ++chunk) {
      const auto elements = ReadChunk(warp, descriptor, first + row, chunk, format);
      std::copy(elements.begin(), elements.end(), rows[static_cast<size_t>(row)].begin() + 16 * chunk);
    }
  }
  return rows;
}

// 9.7.15.5.1.1.3, with g = lane / 4 and t = lane % 4: sum 4 j + c is row g + 8 (c / 2), column 8 j + 2 t + c % 2.
void Make(Warp& warp, Product& product) {
  if (product.is_done) return;
  product.is_done = true;
  const Instruction& in = *product.instruction;
  const Format &a_format = in.bits & 1 ? kE5M2 : kE4M3, &b_format = in.bits & 2 ? kE5M2 : kE4M3;
  position.line = in.line;
  warp.Locate(0);
  const int columns = static_cast<int>(in.sums.size()) * 2;
  const auto a = ReadRows(warp, product.a, warp.rank() % 4 * kRows, kRows, a_format);
  const auto b = ReadRows(warp, product.b, 0, columns, b_format);
  const auto is_undefined = [](const std::array<Element, kDepth>& row) {
    return std::any_of(row.begin(), row.end(), [](const Element& element) { return element.is_undefined; });
  };
  std::vector<bool> a_undefined, b_undefined;
  for (const auto& row : a) a_undefined.push_back(is_undefined(row));
  for (const auto& row : b) b_undefined.push_back(is_undefined(row));
  Sums& sums = warp.products().sums.at(in.sums[0]);
  for (size_t i = 0; i < in.sums.size(); ++i) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const size_t row = lane / 4 + 8 * (i % 4 / 2), column = 8 * (i / 4) + 2 * (lane % 4) + i % 2;
      float& sum = sums.values[i][lane];
      bool& is_bad = sums.are_undefined[i][lane];
      is_bad = (product.adds && is_bad) || a_undefined[row] || b_undefined[column];
      sum = Add(product.adds ? sum : 0, a[row].data(), b[column].data(),
                a_format.mantissa_bits + b_format.mantissa_bits);
    }
  }
}

uint64_t Uniform(Warp& warp, int index, uint64_t mask) {
  const Register& source = warp.at(index);
  for (int lane = 0; lane < kLanes; ++lane) {
    warp.CheckDefined(source.Undefined(lane) & mask, "an operand of wgmma", lane);
    if ((source.value[lane] & mask) != (source.value[0] & mask)) Refuse("warp", "lanes give wgmma different operands");
  }
  return source.value[0] & mask;
}

// No box may come where a product is to read.
void ReadLater(Warp& warp, uint64_t descriptor, int first, int count) {
  if (!warp.block().shared().HasBarriers()) return;
  for (int chunk = 0; chunk < count * kDepth / 16; ++chunk) {
    warp.block().shared().ReadLater(ChunkAddress(descriptor, first + chunk / 2, chunk % 2));
  }
}

void Start(Warp& warp, const Instruction& in, uint32_t) {
  Products& products = warp.products();
  warp.Locate(0);
  if (!products.is_ordered) Refuse("order", "wgmma without wgmma.fence since its sums could be used");
  ++products.started;
  products.groups.back().push_back(
      {&in, Uniform(warp, in.from[1], ~uint64_t{0}), Uniform(warp, in.from[2], ~uint64_t{0}), Uniform(warp, in.from[3], 1) != 0});
  const Product& product = products.groups.back().back();
  ReadLater(warp, product.a, warp.rank() % 4 * kRows, kRows);
  ReadLater(warp, product.b, 0, static_cast<int>(in.sums.size()) * 2);
  const auto [at, is_new] = products.sums.try_emplace(in.sums[0]);
  if (!is_new) return;
  Sums& sums = at->second;
  sums.registers = in.sums;
  for (const int index : in.sums) {
    Register& sum = warp.at(index);
    auto& values = sums.values.emplace_back();
    auto& are_undefined = sums.are_undefined.emplace_back();
    for (int lane = 0; lane < kLanes; ++lane) {
      values[static_cast<size_t>(lane)] = AsFloat(sum.value[lane]);
      are_undefined[static_cast<size_t>(lane)] = (sum.Undefined(lane) & 0xffffffff) != 0;
      sum.Set(lane, 0, 0xffffffff);
    }
  }
}

void Commit(Warp& warp, const Instruction&, uint32_t) {
  auto& groups = warp.products().groups;
  if (runs_backwards) {
    for (Product& product : groups.back()) Make(warp, product);
  }
  groups.emplace_back();
}

// Sums become registers again where no later product adds to them.
void Wait(Warp& warp, const Instruction& in, uint32_t) {
  Products& products = warp.products();
  for (; products.groups.size() > static_cast<size_t>(in.offset) + 1; products.groups.pop_front()) {
    for (Product& product : products.groups.front()) Make(warp, product);
  }
  for (auto at = products.sums.begin(); at != products.sums.end();) {
    bool is_pending = false;
    for (const auto& group : products.groups) {
      for (const Product& product : group) is_pending |= product.instruction->sums[0] == at->first;
    }
    if (is_pending) {
      ++at;
      continue;
    }
    const Sums& sums = at->second;
    for (size_t i = 0; i < sums.registers.size(); ++i) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const auto place = static_cast<size_t>(lane);
        const uint64_t undefined = sums.are_undefined[i][place] ? 0xffffffff : 0;
        warp.at(sums.registers[i]).Set(lane, AsBits(sums.values[i][place]), undefined);
      }
    }
    at = products.sums.erase(at);
    products.is_ordered = false;
  }
}

}  // namespace

bool DecodeWarpgroup(Parser& parser, const std::string& opcode, const std::vector<std::string>& operands,
                     Instruction* in) {
  in->flow = Flow::kCollective;
  in->from[0] = parser.Constant(0xffffffff);
  const std::string product = "wgmma.mma_async.sync.aligned.m64n";
  if (opcode == "wgmma.fence.sync.aligned") {
    in->action = [](Warp& warp, const Instruction&, uint32_t) { warp.products().is_ordered = true; };
  } else if (opcode == "wgmma.commit_group.sync.aligned") {
    in->action = Commit;
  } else if (opcode == "wgmma.wait_group.sync.aligned") {
    in->action = Wait;
    in->offset = std::stoll(operands.at(0));
  } else if (opcode.starts_with(product)) {
    const size_t depth = opcode.find('k', product.size());
    const int columns = std::atoi(opcode.substr(product.size(), depth - product.size()).c_str());
    const std::string types = opcode.substr(depth);
    const bool is_known = types == "k32.f32.e4m3.e4m3" || types == "k32.f32.e4m3.e5m2" || types == "k32.f32.e5m2.e4m3" ||
                          types == "k32.f32.e5m2.e5m2";
    if (!is_known || operands.size() != 6 || operands[4] != "1" || operands[5] != "1") return false;
    in->bits = (types.substr(8, 4) == "e5m2" ? 1 : 0) | (types.substr(13, 4) == "e5m2" ? 2 : 0);
    in->action = Start;
    in->sums = parser.Registers(operands[0]);
    for (size_t i = 1; i < 4; ++i) in->from[i] = parser.Source(operands[i]);
    return in->sums.size() * 2 == static_cast<size_t>(columns);
  } else {
    in->flow = Flow::kNext;
    return false;
  }
  return true;
}

}  // namespace ptx
