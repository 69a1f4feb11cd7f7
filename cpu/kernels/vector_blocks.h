// Blocks in the vectors of an instruction set V: one code a 32-bit lane, combined to 16 and then 8 bits.
//
// The steps that apply to all elements at once (amax, signs, NaN) run in the widest form that the input has: on 16-bit
// lanes for bf16 and f16. Signs are set aside first, so that the rounding core only sees |x| * scale.
//
// V has the types Int, Float, Mask16 and Mask32, kBytes of a vector, and the instructions that blocks_avx2.cc and
// blocks_avx512.cc define. "Lanes" are lanes of 32 bits unless a 16 says otherwise.
#ifndef JAXFP8_CPU_KERNELS_VECTOR_BLOCKS_H_
#define JAXFP8_CPU_KERNELS_VECTOR_BLOCKS_H_

#include <cstdint>
#include <type_traits>

#include "cpu/kernels/kernel_table.h"
#include "cpu/kernels/loops.h"
#include "cpu/kernels/rounding.h"

namespace jaxfp8::cpu {

// The magnitude of the largest finite 16-bit float.
template <class In>
constexpr int16_t kLargest16 = 0x7f7f;
template <>
inline constexpr int16_t kLargest16<F16> = 0x7bff;

template <class V>
struct VectorBlocks {
  using Int = typename V::Int;
  using Float = typename V::Float;
  static constexpr int64_t kLanes = V::kBytes / 4;

  template <Store kStore>
  static void Write(void* pointer, Int value) {
    if constexpr (kStore == Store::kStreamed) {
      V::Stream(pointer, value);
    } else {
      V::Save(pointer, value);
    }
  }

  // The largest magnitude so far; Add returns the magnitudes of what it adds.
  template <class In>
  struct AmaxState {
    static constexpr bool kIs16 = sizeof(In) == 2;

    Int Add(Int x) {
      const Int magnitude = kIs16 ? V::And(x, V::All16(0x7fff)) : V::And(x, V::All(0x7fffffff));
      lanes = kIs16 ? V::Max16(lanes, magnitude) : V::Max(lanes, magnitude);
      return magnitude;
    }

    uint32_t Bits() const {
      if constexpr (kIs16) {
        const uint32_t amax = V::Largest16(lanes);
        if (amax > static_cast<uint32_t>(kLargest16<In>)) return kInfBits;
        if constexpr (std::is_same_v<In, BF16>) return amax << 16;
        return FloatToBits(V::FromHalf(amax));
      } else {
        const uint32_t amax = V::Largest(lanes);
        return amax < kInfBits ? amax : kInfBits;
      }
    }

    Int lanes = V::All(0);
  };

  template <class In>
  class Amax {
   public:
    void operator()(const In* x) {
      constexpr int64_t kStep = V::kBytes / sizeof(In);
      for (int64_t i = 0; i < kBlock; i += kStep) amax_.Add(V::Load(x + i));
    }

    uint32_t Bits() const { return amax_.Bits(); }

   private:
    AmaxState<In> amax_;
  };

  // The scales of a block's elements: of kLanes in a row from i on, or of every other one of twice as many.
  struct SameScale {
    explicit SameScale(float scale) : all(V::AllFloats(scale)) {}
    Float Row(int64_t) const { return all; }
    Float Even(int64_t) const { return all; }
    Float Odd(int64_t) const { return all; }
    void Advance() {}

    Float all;
  };

  struct OwnScales {
    explicit OwnScales(const float* scales) : scales(scales) {}
    Float Row(int64_t i) const { return V::LoadFloats(scales + i); }
    Float Even(int64_t i) const { return V::EvenFloats(Row(i), Row(i + kLanes)); }
    Float Odd(int64_t i) const { return V::OddFloats(Row(i), Row(i + kLanes)); }
    void Advance() { scales += kBlock; }

    const float* scales;
  };

  template <class In, class Format, class Scales = SameScale>
  class Quantize {
   public:
    template <class Argument>
    explicit Quantize(Argument scales) : scales_(scales) {}

    template <Store kStore>
    void operator()(const In* x, uint8_t* codes) {
      for (int64_t i = 0; i < kBlock; i += V::kBytes) Write<kStore>(codes + i, Codes(x + i, i));
      scales_.Advance();
    }

    uint32_t AmaxBits() const { return amax_.Bits(); }

   private:
    // The codes of as many elements as a vector has bytes; i is the first one's place in the block.
    Int Codes(const In* x, int64_t i) {
      if constexpr (std::is_same_v<In, F32>) {
        Int codes[4];
        for (int part = 0; part < 4; ++part) {
          const int64_t begin = kLanes * part;
          codes[part] = Codes32(V::Load(x + begin), scales_.Row(i + begin));
        }
        return V::InOrder32(V::Pack16(V::Pack32(codes[0], codes[1]), V::Pack32(codes[2], codes[3])));
      } else {
        const Int low = Codes16(V::Load(x), i);
        return V::InOrder64(V::Pack16(low, Codes16(V::Load(x + 2 * kLanes), i + 2 * kLanes)));
      }
    }

    // Codes in the low bytes of 16-bit lanes, of 16-bit floats from place i on.
    Int Codes16(Int x, int64_t i) {
      const Int magnitude = amax_.Add(x);
      Int rounded;
      if constexpr (std::is_same_v<In, BF16>) {
        // A bfloat16 in the upper half of a lane is a float: even and odd elements need one instruction each for that.
        const Float even = V::AsFloats(V::template ShiftLeft<16>(magnitude));
        const Float odd = V::AsFloats(V::And(magnitude, V::All(0xffff0000)));
        rounded = V::EvenAndOdd(Round(V::Times(even, scales_.Even(i))),
                                V::template ShiftLeft<16>(Round(V::Times(odd, scales_.Odd(i)))));
      } else {
        rounded = V::Narrow(Round(V::Times(V::LowHalves(magnitude), scales_.Row(i))),
                            Round(V::Times(V::HighHalves(magnitude), scales_.Row(i + kLanes))));
      }
      const Int codes = V::Select(V::All16(0x7f), rounded, V::template ShiftRight16<8>(x));
      return V::Blend16(V::Greater16(magnitude, V::All16(kLargest16<In>)), V::All16(Format::kNanCode), codes);
    }

    // Codes in the low bytes of lanes, of floats.
    Int Codes32(Int x, Float scale) {
      const Int magnitude = amax_.Add(x);
      const Int rounded = Round(V::Times(V::AsFloats(magnitude), scale));
      const Int codes = V::Select(V::All(0x7f), rounded, V::template ShiftRight<24>(x));
      return V::Blend(V::Greater(magnitude, V::All(kInfBits - 1)), V::All(Format::kNanCode), codes);
    }

    // rounding.h on all lanes: the code of y >= 0 in the low 7 bits, rubbish above them.
    static Int Round(Float y) {
      using R = Rounding<Format>;
      y = V::Min(y, V::AsFloats(V::All(R::kMaxBits)));
      const Int exponent = V::And(V::Bits(y), V::All(0x7f800000));
      const Int e = V::Max(exponent, V::All(R::kMinNormalBits));
      const Float magic = V::AsFloats(V::Add(e, V::All(R::kMagic)));
      return V::Add(V::Bits(V::Plus(magic, y)), V::template ShiftRight<R::kShift>(e));
    }

    Scales scales_;
    AmaxState<In> amax_;
  };

  // With a scale for each element: consecutive blocks take consecutive ones.
  template <class In, class Format>
  using QuantizeEach = Quantize<In, Format, OwnScales>;

  template <class Format, class Out>
  class Dequantize {
   public:
    explicit Dequantize(float scale_inv) : scale_inv_(V::AllFloats(scale_inv * kFormatScale)) {}

    template <Store kStore>
    void operator()(const uint8_t* codes, Out* out) {
      for (int64_t i = 0; i < kBlock; i += 2 * kLanes) {
        const Int c = V::LoadBytesAs16(codes + i);
        const auto nan = V::Greater16(V::And(c, V::All16(0x7f)), V::All16(kLastNumber));
        const Int half = AsF16(c);
        const Float low = V::Times(V::LowHalves(half), scale_inv_);
        const Float high = V::Times(V::HighHalves(half), scale_inv_);
        WriteNarrowed<kStore>(low, high, nan, out + i);
      }
    }

   private:
    // Both formats begin like float16: E5M2 is its upper byte, E4M3 is float16's upper bits of value * 2^-8.
    static constexpr bool kIsE5M2 = std::is_same_v<Format, E5M2>;
    static constexpr float kFormatScale = kIsE5M2 ? 1.0f : 256.0f;
    static constexpr int16_t kLastNumber = kIsE5M2 ? 0x7c : 0x7e;

    static Int AsF16(Int codes) {
      const Int upper = V::template ShiftLeft16<8>(codes);
      if constexpr (kIsE5M2) return upper;
      return V::And(V::template ShiftRightSigned16<1>(upper), V::All16(static_cast<int16_t>(0xbf80)));
    }

    // bfloat16 bits in the low half of each lane.
    static Int RoundToBF16(Float y) {
      const Int bits = V::Bits(y);
      const Int odd = V::And(V::template ShiftRight<16>(bits), V::All(1));
      return V::template ShiftRight<16>(V::Add(V::Add(bits, V::All(0x7fff)), odd));
    }

    template <Store kStore>
    static void WriteNarrowed(Float low, Float high, typename V::Mask16 nan, Out* out) {
      if constexpr (std::is_same_v<Out, F32>) {
        const Int quiet = V::All(0x7fc00000);
        Write<kStore>(out, V::Blend(V::LowMask(nan), quiet, V::Bits(low)));
        Write<kStore>(out + kLanes, V::Blend(V::HighMask(nan), quiet, V::Bits(high)));
      } else if constexpr (std::is_same_v<Out, BF16>) {
        const Int packed = V::InOrder64(V::Pack32(RoundToBF16(low), RoundToBF16(high)));
        Write<kStore>(out, V::Blend16(nan, V::All16(0x7fc0), packed));
      } else {
        Write<kStore>(out, V::Blend16(nan, V::All16(0x7e00), V::ToHalves(low, high)));
      }
    }

    Float scale_inv_;
  };

  struct Copy {
    template <Store kStore>
    void operator()(const uint8_t* from, uint8_t* to) {
      for (int64_t i = 0; i < kBlock; i += V::kBytes) Write<kStore>(to + i, V::Load(from + i));
    }
  };

  static constexpr bool kStreams = true;
  static void Fence() { V::Fence(); }

  template <Store kStore>
  static void TransposeTile(const uint8_t* tile, int64_t tile_stride, uint8_t* out, int64_t stride) {
    for (int64_t column = 0; column < kBlock; column += V::kBytes) {
      // bands[q][i]: columns i, 16 + i, ... of these, of rows 16 q to 16 q + 15, 16 bytes each.
      Int bands[4][16];
      for (int q = 0; q < 4; ++q) {
        Int a[16], b[16];
        for (int r = 0; r < 16; ++r) a[r] = V::Load(tile + (16 * q + r) * tile_stride + column);
        Interleave(a, b);
        Interleave(b, a);
        Interleave(a, b);
        Interleave(b, bands[q]);
      }
      for (int i = 0; i < 16; ++i) {
        V::ForRows(bands[0][i], bands[1][i], bands[2][i], bands[3][i], [&](int row, int byte, Int value) {
          Write<kStore>(out + (column + row + i) * stride + byte, value);
        });
      }
    }
  }

 private:
  // One perfect shuffle of each 16 x 16 block of bytes: as an 8-bit number, an element's place rotates left by one.
  // Four of them swap the row's four bits with the column's.
  static void Interleave(const Int (&in)[16], Int (&out)[16]) {
    for (int r = 0; r < 8; ++r) {
      out[2 * r] = V::InterleaveLow8(in[r], in[r + 8]);
      out[2 * r + 1] = V::InterleaveHigh8(in[r], in[r + 8]);
    }
  }
};

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_VECTOR_BLOCKS_H_
