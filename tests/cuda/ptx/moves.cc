// Moves and conversions between registers: mov, cvt, cvta, prmt, bfi.
//
// Sections are those of NVIDIA's "Parallel Thread Execution ISA", version 9.0.
#include <algorithm>
#include <unordered_map>

#include "faults.h"
#include "lanes.h"
#include "numbers.h"
#include "parser.h"

namespace ptx {
namespace {

// -------------------------------------------------------------------------------------------------------- 9.7.9.3, mov
template <class T>
uint64_t Move(uint64_t a, uint64_t, uint64_t) { return static_cast<T>(a); }

// mov d, {a, b, ...}: the first part is the lowest.
void Pack(Warp& warp, const Instruction& in, uint32_t lanes) {
  const uint64_t mask = (uint64_t{1} << in.bits) - 1;
  ForLanes(lanes, [&](int lane) {
    uint64_t value = 0, undefined = 0;
    for (int i = 0; i < in.elements; ++i) {
      const Register& part = warp.at(in.from[static_cast<size_t>(i)]);
      value |= (part.value[lane] & mask) << (i * in.bits);
      undefined |= (part.Undefined(lane) & mask) << (i * in.bits);
    }
    warp.at(in.to[0]).Set(lane, value, undefined);
  });
}

// mov {a, b, ...}, d
void Unpack(Warp& warp, const Instruction& in, uint32_t lanes) {
  const uint64_t mask = (uint64_t{1} << in.bits) - 1;
  ForLanes(lanes, [&](int lane) {
    const uint64_t value = warp.at(in.from[0]).value[lane], undefined = warp.at(in.from[0]).Undefined(lane);
    for (int i = 0; i < in.elements; ++i) {
      const int to = in.to[static_cast<size_t>(i)];
      if (to >= 0) warp.at(to).Set(lane, value >> (i * in.bits) & mask, undefined >> (i * in.bits) & mask);
    }
  });
}

// ------------------------------------------------------------------------------------------------------- 9.7.9.21, cvt
// Integers: the value of a From in a To, cut to its width.
template <class To, class From>
uint64_t Convert(uint64_t a, uint64_t, uint64_t) {
  return static_cast<std::make_unsigned_t<To>>(static_cast<To>(static_cast<From>(a)));
}
template <class To, class From>
uint64_t UndefinedOfConvert(const Operands&, const Operands& undefined) {
  return Convert<To, From>(undefined.a, 0, 0);  // an undefined sign bit is extended, as the value is
}

// .rn is to nearest even; .rzi towards zero, saturating, and 0 for NaN.
template <class From>
uint64_t FloatOfInteger(uint64_t a, uint64_t, uint64_t) { return AsBits(static_cast<float>(static_cast<From>(a))); }
uint64_t IntegerOfFloat(uint64_t a, uint64_t, uint64_t) {
  const float x = AsFloat(a);
  if (x != x) return 0;
  const double limited = std::clamp(static_cast<double>(x), -2147483648.0, 2147483647.0);
  return static_cast<uint32_t>(static_cast<int32_t>(limited));
}

uint64_t FloatOfHalf(uint64_t a, uint64_t, uint64_t) {
  return AsBits(static_cast<float>(Decode(kF16, static_cast<uint32_t>(a) & 0xffff)));
}
uint64_t UndefinedOfHalf(const Operands&, const Operands& undefined) { return undefined.a & 0xffff ? 0xffffffff : 0; }

// cvt d, a, b: a becomes the upper part.
template <const Format& kFormat, bool kSaturates, int kBits>
uint64_t PackFloats(uint64_t a, uint64_t b, uint64_t) {
  return Round(kFormat, AsFloat(a), kSaturates) << kBits | Round(kFormat, AsFloat(b), kSaturates);
}

// Exact: every number of 8 bits is one of f16.
template <const Format& kFormat>
uint64_t HalvesOfCodes(uint64_t a, uint64_t, uint64_t) {
  const auto half = [](uint64_t code) { return Round(kF16, Decode(kFormat, static_cast<uint32_t>(code)), false); };
  return half(a >> 8 & 0xff) << 16 | half(a & 0xff);
}
uint64_t UndefinedOfCodes(const Operands&, const Operands& undefined) {
  return (undefined.a & 0xff00 ? 0xffff0000u : 0u) | (undefined.a & 0xff ? 0xffffu : 0u);
}

// ------------------------------------------------------------------------------------------------------- 9.7.9.7, prmt
// Four bytes of {b, a}, each chosen by 3 bits of c; the fourth bit repeats the sign of the byte.
uint64_t Permute(uint64_t a, uint64_t b, uint64_t c) {
  const uint64_t bytes = b << 32 | (a & 0xffffffff);
  uint64_t result = 0;
  for (int i = 0; i < 4; ++i) {
    const uint64_t selector = c >> (4 * i) & 15;
    uint64_t byte = bytes >> (8 * (selector & 7)) & 0xff;
    if (selector & 8) byte = byte & 0x80 ? 0xff : 0;
    result |= byte << (8 * i);
  }
  return result;
}
uint64_t UndefinedOfPermute(const Operands& values, const Operands& undefined) {
  return undefined.c & 0xffff ? 0xffffffff : Permute(undefined.a, undefined.b, values.c);
}

// -------------------------------------------------------------------------------------------------- 9.7.1.20, bfi
// `length` bits of a, put into b at a position. Four operands, so it is no Each.
void InsertField(Warp& warp, const Instruction& in, uint32_t lanes) {
  const auto operand = [&](size_t i) -> Register& { return warp.at(in.from[i]); };
  ForLanes(lanes, [&](int lane) {
    const uint64_t position = operand(2).value[lane] & 255, length = operand(3).value[lane] & 255;
    warp.CheckDefined(operand(2).Undefined(lane) | operand(3).Undefined(lane), "the place of a field", lane);
    const uint64_t field = length >= 32 ? 0xffffffff : (uint64_t{1} << length) - 1;
    const auto insert = [&](uint64_t a, uint64_t b) {
      return position >= 32 ? b : static_cast<uint32_t>((b & ~(field << position)) | (a & field) << position);
    };
    warp.at(in.to[0]).Set(lane, insert(operand(0).value[lane], operand(1).value[lane]),
                          insert(operand(0).Undefined(lane), operand(1).Undefined(lane)));
  });
}

#define JAXFP8_PTX_CONVERSIONS(to, To)                                                         \
  {"cvt." to ".u8", Each<Convert<To, uint8_t>, UndefinedOfConvert<To, uint8_t>>},              \
  {"cvt." to ".s8", Each<Convert<To, int8_t>, UndefinedOfConvert<To, int8_t>>},                \
  {"cvt." to ".u16", Each<Convert<To, uint16_t>, UndefinedOfConvert<To, uint16_t>>},           \
  {"cvt." to ".s16", Each<Convert<To, int16_t>, UndefinedOfConvert<To, int16_t>>},             \
  {"cvt." to ".u32", Each<Convert<To, uint32_t>, UndefinedOfConvert<To, uint32_t>>},           \
  {"cvt." to ".s32", Each<Convert<To, int32_t>, UndefinedOfConvert<To, int32_t>>},             \
  {"cvt." to ".u64", Each<Convert<To, uint64_t>, UndefinedOfConvert<To, uint64_t>>},           \
  {"cvt." to ".s64", Each<Convert<To, int64_t>, UndefinedOfConvert<To, int64_t>>}

const std::unordered_map<std::string, Action> kActions = {
    {"mov.u16", Each<Move<uint16_t>, Same<uint16_t>>}, {"mov.b16", Each<Move<uint16_t>, Same<uint16_t>>},
    {"mov.u32", Each<Move<uint32_t>, Same<uint32_t>>}, {"mov.b32", Each<Move<uint32_t>, Same<uint32_t>>},
    {"mov.s32", Each<Move<uint32_t>, Same<uint32_t>>}, {"mov.f32", Each<Move<uint32_t>, Same<uint32_t>>},
    {"mov.u64", Each<Move<uint64_t>, Same<uint64_t>>}, {"mov.b64", Each<Move<uint64_t>, Same<uint64_t>>},
    {"mov.pred", Each<Move<uint64_t>, Same<uint64_t>>},
    JAXFP8_PTX_CONVERSIONS("u8", uint8_t), JAXFP8_PTX_CONVERSIONS("u16", uint16_t),
    JAXFP8_PTX_CONVERSIONS("s16", int16_t), JAXFP8_PTX_CONVERSIONS("u32", uint32_t),
    JAXFP8_PTX_CONVERSIONS("s32", int32_t), JAXFP8_PTX_CONVERSIONS("u64", uint64_t),
    JAXFP8_PTX_CONVERSIONS("s64", int64_t),
    {"cvt.rn.f32.s32", Each<FloatOfInteger<int32_t>, Whole<uint32_t>>},
    {"cvt.rn.f32.u32", Each<FloatOfInteger<uint32_t>, Whole<uint32_t>>},
    {"cvt.rn.f32.u16", Each<FloatOfInteger<uint16_t>, Whole<uint32_t>>},
    {"cvt.rzi.s32.f32", Each<IntegerOfFloat, Whole<uint32_t>>},
    {"cvt.f32.f16", Each<FloatOfHalf, UndefinedOfHalf>},
    {"cvt.rn.satfinite.e4m3x2.f32", Each<PackFloats<kE4M3, true, 8>, OfPacked<8>>},
    {"cvt.rn.satfinite.e5m2x2.f32", Each<PackFloats<kE5M2, true, 8>, OfPacked<8>>},
    {"cvt.rn.f16x2.f32", Each<PackFloats<kF16, false, 16>, OfPacked<16>>},
    {"cvt.rn.bf16x2.f32", Each<PackFloats<kBF16, false, 16>, OfPacked<16>>},
    {"cvt.rn.f16x2.e4m3x2", Each<HalvesOfCodes<kE4M3>, UndefinedOfCodes>},
    {"cvt.rn.f16x2.e5m2x2", Each<HalvesOfCodes<kE5M2>, UndefinedOfCodes>},
    {"prmt.b32", Each<Permute, UndefinedOfPermute>},
    {"bfi.b32", InsertField},
    // 9.7.9.20, cvta: the generic addresses of global memory and of parameters are their own.
    {"cvta.param.u64", Each<Move<uint64_t>, Same<uint64_t>>},
    {"cvta.to.global.u64", Each<Move<uint64_t>, Same<uint64_t>>},
};

}  // namespace

bool DecodeMove(Parser& parser, const std::string& opcode, const std::vector<std::string>& operands, Instruction* in) {
  if (opcode.starts_with("mov.") && operands.size() == 2 && (operands[0][0] == '{' || operands[1][0] == '{')) {
    const bool packs = operands[1][0] == '{';
    in->action = packs ? Pack : Unpack;
    in->elements = std::max(parser.Results(operands[0], in), parser.Sources(operands[1], 0, in));
    in->bits = BitsOf(opcode.substr(4)) / in->elements;
    return true;
  }
  return DecodeByOpcode(kActions, parser, opcode, operands, in);
}

}  // namespace ptx
