// Integer and floating-point arithmetic, comparison, selection, logic and shifts.
//
// Sections are those of NVIDIA's "Parallel Thread Execution ISA", version 9.0.
#include <algorithm>
#include <cmath>
#include <type_traits>
#include <unordered_map>

#include "faults.h"
#include "lanes.h"
#include "numbers.h"
#include "parser.h"

namespace ptx {
namespace {

using u16 = uint16_t;
using u32 = uint32_t;
using u64 = uint64_t;
using s16 = int16_t;
using s32 = int32_t;
using s64 = int64_t;

// Registers hold the bits of their type and zeros above them.
template <class T>
u64 Bits(T value) {
  return static_cast<u64>(static_cast<std::make_unsigned_t<T>>(value));
}

// ------------------------------------------------------------------------------------- 9.7.1 integer arithmetic
template <class T>
u64 Add(u64 a, u64 b, u64) { return static_cast<T>(a + b); }
template <class T>
u64 Sub(u64 a, u64 b, u64) { return static_cast<T>(a - b); }
template <class T>
u64 MulLow(u64 a, u64 b, u64) { return static_cast<T>(a * b); }
template <class T>
u64 MulHigh(u64 a, u64 b, u64) {
  using Wide = std::conditional_t<std::is_signed_v<T>, __int128, unsigned __int128>;
  return Bits(static_cast<T>((static_cast<Wide>(static_cast<T>(a)) * static_cast<T>(b)) >> (8 * sizeof(T))));
}
template <class T>
using Wider = std::conditional_t<sizeof(T) == 2, std::conditional_t<std::is_signed_v<T>, s32, u32>,
                                 std::conditional_t<std::is_signed_v<T>, s64, u64>>;
template <class T>
u64 MulWide(u64 a, u64 b, u64) {
  const auto wide = [](u64 bits) { return static_cast<Wider<T>>(static_cast<T>(bits)); };
  return Bits(static_cast<Wider<T>>(wide(a) * wide(b)));
}
template <class T>
u64 MadLow(u64 a, u64 b, u64 c) { return static_cast<T>(a * b + c); }
template <class T>
u64 MadWide(u64 a, u64 b, u64 c) { return MulWide<T>(a, b, 0) + c; }
template <class T>
u64 Div(u64 a, u64 b, u64) {
  if (static_cast<T>(b) == 0) Refuse("undefined", "a division by zero");
  return Bits(static_cast<T>(static_cast<T>(a) / static_cast<T>(b)));
}
template <class T>
u64 Rem(u64 a, u64 b, u64) {
  if (static_cast<T>(b) == 0) Refuse("undefined", "a division by zero");
  return Bits(static_cast<T>(static_cast<T>(a) % static_cast<T>(b)));
}
template <class T>
u64 Neg(u64 a, u64, u64) { return static_cast<T>(0 - a); }
template <class T>
u64 Min(u64 a, u64 b, u64) { return Bits(std::min(static_cast<T>(a), static_cast<T>(b))); }
template <class T>
u64 Max(u64 a, u64 b, u64) { return Bits(std::max(static_cast<T>(a), static_cast<T>(b))); }
// 9.7.1.19, bfe.u32: `length` bits of a from position b on.
u64 ExtractField(u64 a, u64 b, u64 c) {
  const u64 position = b & 255, length = c & 255;
  if (position >= 32) return 0;
  return (static_cast<u32>(a) >> position) & (length >= 32 ? ~0u : (1u << length) - 1);
}

// ----------------------------------------------------------------------------------------- 9.7.3 floating point
u64 AddFloat(u64 a, u64 b, u64) { return AsBits(AsFloat(a) + AsFloat(b)); }
u64 SubFloat(u64 a, u64 b, u64) { return AsBits(AsFloat(a) - AsFloat(b)); }
u64 MulFloat(u64 a, u64 b, u64) { return AsBits(AsFloat(a) * AsFloat(b)); }
// Of two significands of 24 bits the product is exact in f64, and f32 takes the bits that it has room for.
u64 MulFloatTowardsZero(u64 a, u64 b, u64) {
  const double exact = static_cast<double>(AsFloat(a)) * AsFloat(b);
  float product = static_cast<float>(exact);
  if (std::fabs(product) > std::fabs(exact)) product = std::nextafterf(product, 0.0f);
  return AsBits(product);
}
u64 FmaFloat(u64 a, u64 b, u64 c) { return AsBits(std::fmaf(AsFloat(a), AsFloat(b), AsFloat(c))); }
u64 DivFloat(u64 a, u64 b, u64) { return AsBits(AsFloat(a) / AsFloat(b)); }
u64 SqrtFloat(u64 a, u64, u64) { return AsBits(std::sqrt(AsFloat(a))); }
u64 AbsFloat(u64 a, u64, u64) { return AsBits(std::fabs(AsFloat(a))); }
u64 NegFloat(u64 a, u64, u64) { return AsBits(-AsFloat(a)); }
u64 MinFloat(u64 a, u64 b, u64) { return AsBits(Smaller(AsFloat(a), AsFloat(b), false)); }
u64 MinFloatOrNan(u64 a, u64 b, u64) { return AsBits(Smaller(AsFloat(a), AsFloat(b), true)); }
u64 MaxFloat(u64 a, u64 b, u64) { return AsBits(Larger(AsFloat(a), AsFloat(b), false)); }
u64 MaxFloatOrNan(u64 a, u64 b, u64) { return AsBits(Larger(AsFloat(a), AsFloat(b), true)); }
u64 Exp2(u64 a, u64, u64) { return AsBits(ApproximateExp2(AsFloat(a))); }
u64 Reciprocal(u64 a, u64, u64) { return AsBits(ApproximateReciprocal(AsFloat(a))); }
u64 ReciprocalRoot(u64 a, u64, u64) { return AsBits(ApproximateReciprocalRoot(AsFloat(a))); }
// 9.7.3.5, .sat: NaN becomes 0.
u64 MulFloatUpToOne(u64 a, u64 b, u64) {
  const float product = AsFloat(a) * AsFloat(b);
  return AsBits(product > 0 ? std::min(product, 1.0f) : 0.0f);
}
// 9.7.3.2: the sign of a, the magnitude of b.
u64 CopySign(u64 a, u64 b, u64) { return (a & 0x80000000) | (b & 0x7fffffff); }
u64 UndefinedOfCopySign(const Operands&, const Operands& undefined) {
  return (undefined.a & 0x80000000) | (undefined.b & 0x7fffffff);
}

// ---------------------------------------------------------------------------- 9.7.4 half precision floating point
template <const Format& kFormat>
u64 FmaPair(u64 a, u64 b, u64 c) {
  const auto half = [&](int shift) {
    return MultiplyAdd(kFormat, a >> shift & 0xffff, b >> shift & 0xffff, c >> shift & 0xffff);
  };
  return half(0) | half(16) << 16;
}
template <const Format& kFormat>
u64 LargerMagnitudePair(u64 a, u64 b, u64) {
  const auto half = [&](int shift) { return LargerMagnitude(kFormat, a >> shift & 0xffff, b >> shift & 0xffff); };
  return half(0) | half(16) << 16;
}

// ------------------------------------------------------------------------------- 9.7.6 comparison and selection
enum class Comparison { kEq, kNe, kLt, kLe, kGt, kGe };

template <class T, Comparison kComparison>
bool Compare(T a, T b) {
  switch (kComparison) {
    case Comparison::kEq: return a == b;
    case Comparison::kNe: return a != b;
    case Comparison::kLt: return a < b;
    case Comparison::kLe: return a <= b;
    case Comparison::kGt: return a > b;
    case Comparison::kGe: return a >= b;
  }
  return false;
}
template <class T, Comparison kComparison>
u64 Setp(u64 a, u64 b, u64) { return Compare<T, kComparison>(static_cast<T>(a), static_cast<T>(b)); }
// Ordered comparisons are false where an operand is NaN, unordered ones true.
template <Comparison kComparison, bool kIfNan>
u64 SetpFloat(u64 a, u64 b, u64) {
  const float x = AsFloat(a), y = AsFloat(b);
  return x != x || y != y ? kIfNan : Compare<float, kComparison>(x, y);
}
template <bool kIfNan>
u64 SetpNan(u64 a, u64 b, u64) {
  const float x = AsFloat(a), y = AsFloat(b);
  return (x != x || y != y) == kIfNan;
}
template <class T>
u64 Select(u64 a, u64 b, u64 c) { return static_cast<T>(c & 1 ? a : b); }

// ------------------------------------------------------------------------------------------ 9.7.8 logic and shift
u64 And(u64 a, u64 b, u64) { return a & b; }
u64 Or(u64 a, u64 b, u64) { return a | b; }
u64 Xor(u64 a, u64 b, u64) { return a ^ b; }
template <class T>
u64 Not(u64 a, u64, u64) { return static_cast<T>(~a); }
u64 NotPredicate(u64 a, u64, u64) { return ~a & 1; }
// 9.7.8.8, 9.7.8.9: shifts by more than the width are shifts by the width.
template <class T>
u64 ShiftLeft(u64 a, u64 b, u64) {
  const u32 by = static_cast<u32>(b);
  return by >= 8 * sizeof(T) ? 0 : static_cast<T>(a << by);
}
template <class T>
u64 ShiftRight(u64 a, u64 b, u64) {
  const u32 most = 8 * sizeof(T) - 1, by = static_cast<u32>(b);
  if (by > most && !std::is_signed_v<T>) return 0;
  return Bits(static_cast<T>(static_cast<T>(a) >> std::min(by, most)));
}
template <class T, u64 (*kShift)(u64, u64, u64)>
u64 UndefinedOfShift(const Operands& values, const Operands& undefined) {
  if (undefined.b & 0xffffffff) return kAllBits<T>;
  return kShift(undefined.a, values.b, 0) & kAllBits<T>;
}

#define JAXFP8_PTX_COMPARISONS(type, T)                                     \
  {"setp.eq." type, Each<Setp<T, Comparison::kEq>, Predicate<T>>},          \
  {"setp.ne." type, Each<Setp<T, Comparison::kNe>, Predicate<T>>},          \
  {"setp.lt." type, Each<Setp<T, Comparison::kLt>, Predicate<T>>},          \
  {"setp.le." type, Each<Setp<T, Comparison::kLe>, Predicate<T>>},          \
  {"setp.gt." type, Each<Setp<T, Comparison::kGt>, Predicate<T>>},          \
  {"setp.ge." type, Each<Setp<T, Comparison::kGe>, Predicate<T>>}

#define JAXFP8_PTX_INTEGER(type, T)                                         \
  JAXFP8_PTX_COMPARISONS(type, T),                                          \
  {"add." type, Each<Add<std::make_unsigned_t<T>>, Carried<T>>},            \
  {"sub." type, Each<Sub<std::make_unsigned_t<T>>, Carried<T>>},            \
  {"mul.lo." type, Each<MulLow<std::make_unsigned_t<T>>, Carried<T>>},      \
  {"mul.hi." type, Each<MulHigh<T>, Whole<std::make_unsigned_t<T>>>},       \
  {"mad.lo." type, Each<MadLow<std::make_unsigned_t<T>>, Carried<T>>},      \
  {"div." type, Each<Div<T>, Whole<std::make_unsigned_t<T>>>},              \
  {"rem." type, Each<Rem<T>, Whole<std::make_unsigned_t<T>>>},              \
  {"neg." type, Each<Neg<std::make_unsigned_t<T>>, Carried<T>>},            \
  {"min." type, Each<Min<T>, Whole<std::make_unsigned_t<T>>>},              \
  {"max." type, Each<Max<T>, Whole<std::make_unsigned_t<T>>>},              \
  {"selp." type, Each<Select<std::make_unsigned_t<T>>, Selected<std::make_unsigned_t<T>>>}, \
  {"shr." type, Each<ShiftRight<T>, UndefinedOfShift<std::make_unsigned_t<T>, ShiftRight<T>>>}

#define JAXFP8_PTX_BITS(type, T)                                            \
  {"and." type, Each<And, OfAnd>}, {"or." type, Each<Or, OfOr>}, {"xor." type, Each<Xor, Same<T>>}, \
  {"not." type, Each<Not<T>, Same<T>>},                                     \
  {"selp." type, Each<Select<T>, Selected<T>>},                             \
  {"setp.eq." type, Each<Setp<T, Comparison::kEq>, Predicate<T>>},          \
  {"setp.ne." type, Each<Setp<T, Comparison::kNe>, Predicate<T>>},          \
  {"shl." type, Each<ShiftLeft<T>, UndefinedOfShift<T, ShiftLeft<T>>>},     \
  {"shr." type, Each<ShiftRight<T>, UndefinedOfShift<T, ShiftRight<T>>>}

#define JAXFP8_PTX_FLOAT_COMPARISON(name, comparison)                                    \
  {"setp." name ".f32", Each<SetpFloat<Comparison::comparison, false>, Predicate<u32>>}, \
  {"setp." name "u.f32", Each<SetpFloat<Comparison::comparison, true>, Predicate<u32>>}

const std::unordered_map<std::string, Action> kActions = {
    JAXFP8_PTX_INTEGER("u16", u16), JAXFP8_PTX_INTEGER("s16", s16), JAXFP8_PTX_INTEGER("u32", u32),
    JAXFP8_PTX_INTEGER("s32", s32), JAXFP8_PTX_INTEGER("u64", u64), JAXFP8_PTX_INTEGER("s64", s64),
    JAXFP8_PTX_BITS("b16", u16), JAXFP8_PTX_BITS("b32", u32), JAXFP8_PTX_BITS("b64", u64),
    {"mul.wide.u16", Each<MulWide<u16>, Whole<u32>>}, {"mul.wide.s16", Each<MulWide<s16>, Whole<u32>>},
    {"mul.wide.u32", Each<MulWide<u32>, Whole<u64>>}, {"mul.wide.s32", Each<MulWide<s32>, Whole<u64>>},
    {"mad.wide.u32", Each<MadWide<u32>, Whole<u64>>}, {"mad.wide.s32", Each<MadWide<s32>, Whole<u64>>},
    {"bfe.u32", Each<ExtractField, Whole<u32>>},
    {"add.f32", Each<AddFloat, Whole<u32>>}, {"add.rn.f32", Each<AddFloat, Whole<u32>>},
    {"sub.f32", Each<SubFloat, Whole<u32>>}, {"sub.rn.f32", Each<SubFloat, Whole<u32>>},
    {"mul.rz.f32", Each<MulFloatTowardsZero, Whole<u32>>}, {"mul.rn.sat.f32", Each<MulFloatUpToOne, Whole<u32>>},
    {"mul.f32", Each<MulFloat, Whole<u32>>}, {"mul.rn.f32", Each<MulFloat, Whole<u32>>},
    {"fma.rn.f32", Each<FmaFloat, Whole<u32>>}, {"div.rn.f32", Each<DivFloat, Whole<u32>>},
    {"sqrt.rn.f32", Each<SqrtFloat, Whole<u32>>}, {"abs.f32", Each<AbsFloat, Whole<u32>>},
    {"neg.f32", Each<NegFloat, Whole<u32>>}, {"min.f32", Each<MinFloat, Whole<u32>>},
    {"min.NaN.f32", Each<MinFloatOrNan, Whole<u32>>},
    {"max.f32", Each<MaxFloat, Whole<u32>>}, {"max.NaN.f32", Each<MaxFloatOrNan, Whole<u32>>},
    {"ex2.approx.ftz.f32", Each<Exp2, Whole<u32>>}, {"rcp.approx.ftz.f32", Each<Reciprocal, Whole<u32>>},
    {"rsqrt.approx.ftz.f32", Each<ReciprocalRoot, Whole<u32>>},
    {"copysign.f32", Each<CopySign, UndefinedOfCopySign>},
    {"fma.rn.f16x2", Each<FmaPair<kF16>, OfHalves>}, {"fma.rn.bf16x2", Each<FmaPair<kBF16>, OfHalves>},
    {"max.NaN.xorsign.abs.f16x2", Each<LargerMagnitudePair<kF16>, OfHalves>},
    {"max.NaN.xorsign.abs.bf16x2", Each<LargerMagnitudePair<kBF16>, OfHalves>},
    JAXFP8_PTX_FLOAT_COMPARISON("eq", kEq), JAXFP8_PTX_FLOAT_COMPARISON("ne", kNe),
    JAXFP8_PTX_FLOAT_COMPARISON("lt", kLt), JAXFP8_PTX_FLOAT_COMPARISON("le", kLe),
    JAXFP8_PTX_FLOAT_COMPARISON("gt", kGt), JAXFP8_PTX_FLOAT_COMPARISON("ge", kGe),
    {"setp.nan.f32", Each<SetpNan<true>, Predicate<u32>>}, {"setp.num.f32", Each<SetpNan<false>, Predicate<u32>>},
    {"selp.f32", Each<Select<u32>, Selected<u32>>},
    {"and.pred", Each<And, OfAnd>}, {"or.pred", Each<Or, OfOr>}, {"xor.pred", Each<Xor, Same<u64>>},
    {"not.pred", Each<NotPredicate, Same<u64>>},
};

}  // namespace

bool DecodeArithmetic(Parser& parser, const std::string& opcode, const std::vector<std::string>& operands,
                      Instruction* in) {
  return DecodeByOpcode(kActions, parser, opcode, operands, in);
}

}  // namespace ptx
