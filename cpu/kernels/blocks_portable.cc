// Blocks in plain C++: the codec of fp8.h element by element, in loops that compilers vectorise for SSE2 and NEON.
#include <cstdint>

#include "cpu/kernels/half.h"
#include "cpu/kernels/kernel_table.h"
#include "cpu/kernels/loops.h"
#include "cpu/kernels/rounding.h"

namespace jaxfp8::cpu {
namespace {

// The scales of a block's elements.
struct SameScale {
  float At(int64_t) const { return scale; }
  void Advance() {}

  float scale;
};

struct OwnScales {
  float At(int64_t i) const { return scales[i]; }
  void Advance() { scales += kBlock; }

  const float* scales;
};

struct PortableBlocks {
  template <class In>
  class Amax {
   public:
    void operator()(const In* x) {
      for (int64_t i = 0; i < kBlock; i += kLanes) {
        for (int64_t lane = 0; lane < kLanes; ++lane) {
          const int32_t bits = static_cast<int32_t>(::jaxfp8::AmaxBits(Widen(x[i + lane])));
          lanes_[lane] = bits > lanes_[lane] ? bits : lanes_[lane];
        }
      }
    }

    uint32_t Bits() const {
      int32_t amax = 0;
      for (int32_t bits : lanes_) amax = bits > amax ? bits : amax;
      return static_cast<uint32_t>(amax);
    }

   private:
    static constexpr int64_t kLanes = 16;
    int32_t lanes_[kLanes] = {};  // signed: SSE2 compares signed integers only, and |x| as bits is never negative
  };

  template <class In, class Format, class Scales = SameScale>
  class Quantize {
   public:
    template <class Argument>
    explicit Quantize(Argument scales) : scales_{scales} {}

    template <Store>
    void operator()(const In* x, uint8_t* codes) {
      amax_(x);
      for (int64_t i = 0; i < kBlock; ++i) codes[i] = Code(Widen(x[i]), scales_.At(i));
      scales_.Advance();
    }

    uint32_t AmaxBits() const { return amax_.Bits(); }

   private:
    // fp8.h Quantize as rounding.h does it. Signed integers: SSE2 has no unsigned comparison.
    static uint8_t Code(float x, float scale) {
      using R = Rounding<Format>;
      constexpr int32_t kInf = kInfBits, kMax = R::kMaxBits, kMinNormal = R::kMinNormalBits, kMagic = R::kMagic;
      const float y = x * scale;
      const int32_t x_magnitude = FloatToBits(x) & kAbsMask;
      const int32_t y_magnitude = FloatToBits(y) & kAbsMask;
      const int32_t magnitude = y_magnitude < kMax ? y_magnitude : kMax;
      const int32_t exponent = magnitude & kInf;
      const int32_t e = exponent > kMinNormal ? exponent : kMinNormal;
      const int32_t rounded = FloatToBits(BitsToFloat(e + kMagic) + BitsToFloat(magnitude)) + (e >> R::kShift);
      const int32_t code = (rounded & 0x7f) | (FloatToBits(y) >> 24 & 0x80);
      return static_cast<uint8_t>((x_magnitude >= kInf) | (y_magnitude > kInf) ? Format::kNanCode : code);
    }

    Scales scales_;
    Amax<In> amax_;
  };

  // With a scale for each element: consecutive blocks take consecutive ones.
  template <class In, class Format>
  using QuantizeEach = Quantize<In, Format, OwnScales>;

  template <class Format, class Out>
  class Dequantize {
   public:
    explicit Dequantize(float scale_inv) {
      for (int code = 0; code < 256; ++code) {
        table_[code] = Narrow<Out>(Decode<Format>(static_cast<uint8_t>(code)) * scale_inv);
      }
    }

    template <Store>
    void operator()(const uint8_t* codes, Out* out) {
      for (int64_t i = 0; i < kBlock; ++i) out[i] = table_[codes[i]];
    }

   private:
    Out table_[256];
  };

  struct Copy {
    template <Store>
    void operator()(const uint8_t* from, uint8_t* to) {
      memcpy(to, from, kBlock);
    }
  };

  static constexpr bool kStreams = false;
  static void Fence() {}

  template <Store>
  static void TransposeTile(const uint8_t* tile, int64_t tile_stride, uint8_t* out, int64_t stride) {
    for (int64_t c = 0; c < kBlock; ++c) {
      for (int64_t r = 0; r < kBlock; ++r) out[c * stride + r] = tile[r * tile_stride + c];
    }
  }
};

}  // namespace

const KernelTable kPortableKernels = MakeTable<PortableBlocks>("portable");

}  // namespace jaxfp8::cpu
