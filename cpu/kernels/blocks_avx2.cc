// Blocks in AVX2 and F16C: the steps of blocks_avx512.cc on 8 lanes, with comparisons as vectors of ones.
#include <immintrin.h>

#include <cstdint>
#include <type_traits>

#include "cpu/kernels/kernel_table.h"
#include "cpu/kernels/loops.h"
#include "cpu/kernels/rounding.h"

namespace jaxfp8::cpu {
namespace {

__m256i Load(const void* pointer) { return _mm256_loadu_si256(static_cast<const __m256i*>(pointer)); }

template <Store kStore>
void Write(void* pointer, __m256i value) {
  if constexpr (kStore == Store::kStreamed) {
    _mm256_stream_si256(static_cast<__m256i*>(pointer), value);
  } else {
    _mm256_storeu_si256(static_cast<__m256i*>(pointer), value);
  }
}

template <class In>
constexpr int16_t kLargest16 = 0x7f7f;
template <>
constexpr int16_t kLargest16<F16> = 0x7bff;

// For In = BF16 or F16: 16 magnitudes.
template <class In>
struct Amax16 {
  void Add(__m256i magnitude) { lanes = _mm256_max_epu16(lanes, magnitude); }

  uint32_t Bits() const {
    alignas(32) uint16_t values[16];
    _mm256_store_si256(reinterpret_cast<__m256i*>(values), lanes);
    uint32_t amax = 0;
    for (uint32_t value : values) amax = value > amax ? value : amax;
    if (amax > kLargest16<In>) return kInfBits;
    if constexpr (std::is_same_v<In, BF16>) return amax << 16;
    return FloatToBits(_mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(static_cast<int>(amax)))));
  }

  __m256i lanes = _mm256_setzero_si256();
};

struct Amax32 {
  void Add(__m256i magnitude) { lanes = _mm256_max_epu32(lanes, magnitude); }

  uint32_t Bits() const {
    alignas(32) uint32_t values[8];
    _mm256_store_si256(reinterpret_cast<__m256i*>(values), lanes);
    uint32_t amax = 0;
    for (uint32_t value : values) amax = value > amax ? value : amax;
    return amax < kInfBits ? amax : kInfBits;
  }

  __m256i lanes = _mm256_setzero_si256();
};

template <class In>
using AmaxState = std::conditional_t<std::is_same_v<In, F32>, Amax32, Amax16<In>>;

__m256i Magnitude16(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi16(0x7fff)); }
__m256i Magnitude32(__m256i x) { return _mm256_and_si256(x, _mm256_set1_epi32(0x7fffffff)); }

// rounding.h on 8 lanes: the code of y >= 0.
template <class Format>
__m256i Round(__m256 y) {
  using R = Rounding<Format>;
  y = _mm256_min_ps(y, _mm256_castsi256_ps(_mm256_set1_epi32(R::kMaxBits)));
  const __m256i exponent = _mm256_and_si256(_mm256_castps_si256(y), _mm256_set1_epi32(0x7f800000));
  const __m256i e = _mm256_max_epu32(exponent, _mm256_set1_epi32(R::kMinNormalBits));
  const __m256 magic = _mm256_castsi256_ps(_mm256_add_epi32(e, _mm256_set1_epi32(R::kMagic)));
  const __m256i code =
      _mm256_add_epi32(_mm256_castps_si256(_mm256_add_ps(magic, y)), _mm256_srli_epi32(e, R::kShift));
  return _mm256_and_si256(code, _mm256_set1_epi32(0x7f));
}

// The scales of a block's elements: of 8 in a row from i on, or of every other of 16.
struct SameScale {
  explicit SameScale(float scale) : all(_mm256_set1_ps(scale)) {}
  __m256 Row(int64_t) const { return all; }
  __m256 Even(int64_t) const { return all; }
  __m256 Odd(int64_t) const { return all; }
  void Advance() {}

  __m256 all;
};

struct OwnScales {
  explicit OwnScales(const float* scales) : scales(scales) {}
  __m256 Row(int64_t i) const { return _mm256_loadu_ps(scales + i); }
  __m256 Even(int64_t i) const { return EveryOther<0x88>(i); }
  __m256 Odd(int64_t i) const { return EveryOther<0xdd>(i); }
  void Advance() { scales += kBlock; }

  // A shuffle works within 128 bits, so the two 64-bit words in the middle are in each other's place.
  template <int kPlaces>
  __m256 EveryOther(int64_t i) const {
    const __m256 shuffled = _mm256_shuffle_ps(Row(i), Row(i + 8), kPlaces);
    return _mm256_castpd_ps(_mm256_permute4x64_pd(_mm256_castps_pd(shuffled), 0xd8));
  }

  const float* scales;
};

// 16 codes, in 16-bit lanes, of 16 16-bit inputs: elements i to i + 15 of a block.
template <class In, class Format, class Scales>
__m256i Codes16(__m256i x, __m256i magnitude, const Scales& scales, int64_t i) {
  __m256i rounded;
  if constexpr (std::is_same_v<In, BF16>) {
    // A bfloat16 in the upper half of a lane is a float: even and odd elements need one instruction each to get there.
    const __m256 even = _mm256_castsi256_ps(_mm256_slli_epi32(magnitude, 16));
    const __m256 odd = _mm256_castsi256_ps(_mm256_and_si256(magnitude, _mm256_set1_epi32(0xffff0000)));
    rounded = _mm256_or_si256(Round<Format>(_mm256_mul_ps(even, scales.Even(i))),
                              _mm256_slli_epi32(Round<Format>(_mm256_mul_ps(odd, scales.Odd(i))), 16));
  } else {
    const __m256 low = _mm256_cvtph_ps(_mm256_castsi256_si128(magnitude));
    const __m256 high = _mm256_cvtph_ps(_mm256_extracti128_si256(magnitude, 1));
    rounded = _mm256_permute4x64_epi64(_mm256_packus_epi32(Round<Format>(_mm256_mul_ps(low, scales.Row(i))),
                                                           Round<Format>(_mm256_mul_ps(high, scales.Row(i + 8)))),
                                       0xd8);
  }
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi16(x, 8), _mm256_set1_epi16(0x80));
  const __m256i special = _mm256_cmpgt_epi16(magnitude, _mm256_set1_epi16(kLargest16<In>));
  return _mm256_blendv_epi8(_mm256_or_si256(rounded, sign), _mm256_set1_epi16(Format::kNanCode), special);
}

// 8 codes, in 32-bit lanes, of 8 floats.
template <class Format>
__m256i Codes32(__m256i x, __m256i magnitude, __m256 scale) {
  const __m256i rounded = Round<Format>(_mm256_mul_ps(_mm256_castsi256_ps(magnitude), scale));
  const __m256i sign = _mm256_and_si256(_mm256_srli_epi32(x, 24), _mm256_set1_epi32(0x80));
  const __m256i special = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(kInfBits - 1));
  return _mm256_blendv_epi8(_mm256_or_si256(rounded, sign), _mm256_set1_epi32(Format::kNanCode), special);
}

struct Avx2Blocks {
  template <class In>
  class Amax {
   public:
    void operator()(const In* x) {
      constexpr int64_t kLanes = 32 / sizeof(In);
      for (int64_t i = 0; i < kBlock; i += kLanes) {
        if constexpr (std::is_same_v<In, F32>) {
          amax_.Add(Magnitude32(Load(x + i)));
        } else {
          amax_.Add(Magnitude16(Load(x + i)));
        }
      }
    }

    uint32_t Bits() const { return amax_.Bits(); }

   private:
    AmaxState<In> amax_;
  };

  template <class In, class Format, class Scales = SameScale>
  class Quantize {
   public:
    template <class Argument>
    explicit Quantize(Argument scales) : scales_(scales) {}

    template <Store kStore>
    void operator()(const In* x, uint8_t* codes) {
      Write<kStore>(codes, Codes(x, 0));
      Write<kStore>(codes + 32, Codes(x, 32));
      scales_.Advance();
    }

    uint32_t AmaxBits() const { return amax_.Bits(); }

   private:
    __m256i Codes(const In* x, int64_t begin) {
      if constexpr (std::is_same_v<In, F32>) {
        __m256i codes[4];
        for (int i = 0; i < 4; ++i) {
          const __m256i values = Load(x + begin + 8 * i);
          const __m256i magnitude = Magnitude32(values);
          amax_.Add(magnitude);
          codes[i] = Codes32<Format>(values, magnitude, scales_.Row(begin + 8 * i));
        }
        const __m256i packed =
            _mm256_packus_epi16(_mm256_packus_epi32(codes[0], codes[1]), _mm256_packus_epi32(codes[2], codes[3]));
        // Packing works within 128 bits: 32-bit word 4 * l + i now holds the codes of lane l of codes[i].
        return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
      } else {
        __m256i codes[2];
        for (int i = 0; i < 2; ++i) {
          const __m256i values = Load(x + begin + 16 * i);
          const __m256i magnitude = Magnitude16(values);
          amax_.Add(magnitude);
          codes[i] = Codes16<In, Format>(values, magnitude, scales_, begin + 16 * i);
        }
        return _mm256_permute4x64_epi64(_mm256_packus_epi16(codes[0], codes[1]), 0xd8);
      }
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
    explicit Dequantize(float scale_inv) : scale_inv_(_mm256_set1_ps(scale_inv * kFormatScale)) {}

    template <Store kStore>
    void operator()(const uint8_t* codes, Out* out) {
      for (int64_t i = 0; i < kBlock; i += 16) {
        const __m256i c = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + i)));
        const __m256i nan = _mm256_cmpgt_epi16(_mm256_and_si256(c, _mm256_set1_epi16(0x7f)),
                                               _mm256_set1_epi16(kLastNumber));
        const __m256i half = AsF16(c);
        const __m256 low = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_castsi256_si128(half)), scale_inv_);
        const __m256 high = _mm256_mul_ps(_mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)), scale_inv_);
        WriteNarrowed<kStore>(low, high, nan, out + i);
      }
    }

   private:
    // Both formats begin like float16: E5M2 is its upper byte, E4M3 is float16's upper bits of value * 2^-8.
    static constexpr bool kIsE5M2 = std::is_same_v<Format, E5M2>;
    static constexpr float kFormatScale = kIsE5M2 ? 1.0f : 256.0f;
    static constexpr int16_t kLastNumber = kIsE5M2 ? 0x7c : 0x7e;

    static __m256i AsF16(__m256i codes) {
      const __m256i upper = _mm256_slli_epi16(codes, 8);
      if constexpr (kIsE5M2) return upper;
      return _mm256_and_si256(_mm256_srai_epi16(upper, 1), _mm256_set1_epi16(static_cast<int16_t>(0xbf80)));
    }

    // bfloat16 bits in the low half of each lane.
    static __m256i RoundToBF16(__m256 y) {
      const __m256i bits = _mm256_castps_si256(y);
      const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
      return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
    }

    template <Store kStore>
    static void WriteNarrowed(__m256 low, __m256 high, __m256i nan, Out* out) {
      if constexpr (std::is_same_v<Out, F32>) {
        const __m256i quiet = _mm256_set1_epi32(0x7fc00000);
        const __m256i nan_low = _mm256_cvtepi16_epi32(_mm256_castsi256_si128(nan));
        const __m256i nan_high = _mm256_cvtepi16_epi32(_mm256_extracti128_si256(nan, 1));
        Write<kStore>(out, _mm256_blendv_epi8(_mm256_castps_si256(low), quiet, nan_low));
        Write<kStore>(out + 8, _mm256_blendv_epi8(_mm256_castps_si256(high), quiet, nan_high));
      } else if constexpr (std::is_same_v<Out, BF16>) {
        const __m256i packed = _mm256_packus_epi32(RoundToBF16(low), RoundToBF16(high));
        const __m256i ordered = _mm256_permute4x64_epi64(packed, 0xd8);
        Write<kStore>(out, _mm256_blendv_epi8(ordered, _mm256_set1_epi16(0x7fc0), nan));
      } else {
        constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        const __m256i packed = _mm256_set_m128i(_mm256_cvtps_ph(high, kNearest), _mm256_cvtps_ph(low, kNearest));
        Write<kStore>(out, _mm256_blendv_epi8(packed, _mm256_set1_epi16(0x7e00), nan));
      }
    }

    __m256 scale_inv_;
  };

  struct Copy {
    template <Store kStore>
    void operator()(const uint8_t* from, uint8_t* to) {
      Write<kStore>(to, Load(from));
      Write<kStore>(to + 32, Load(from + 32));
    }
  };

  static void Fence() { _mm_sfence(); }

  template <Store kStore>
  static void TransposeTile(const uint8_t* tile, int64_t tile_stride, uint8_t* out, int64_t stride) {
    for (int column = 0; column < kBlock; column += 32) {
      // bands[q][i]: columns i and 16 + i of these 32, of rows 16 q to 16 q + 15, 16 bytes each.
      __m256i bands[4][16];
      for (int q = 0; q < 4; ++q) {
        __m256i a[16], b[16];
        for (int r = 0; r < 16; ++r) a[r] = Load(tile + (16 * q + r) * tile_stride + column);
        Interleave(a, b);
        Interleave(b, a);
        Interleave(a, b);
        Interleave(b, bands[q]);
      }
      for (int i = 0; i < 16; ++i) {
        uint8_t* low = out + (column + i) * stride;
        uint8_t* high = low + 16 * stride;
        Write<kStore>(low, _mm256_permute2x128_si256(bands[0][i], bands[1][i], 0x20));
        Write<kStore>(low + 32, _mm256_permute2x128_si256(bands[2][i], bands[3][i], 0x20));
        Write<kStore>(high, _mm256_permute2x128_si256(bands[0][i], bands[1][i], 0x31));
        Write<kStore>(high + 32, _mm256_permute2x128_si256(bands[2][i], bands[3][i], 0x31));
      }
    }
  }

 private:
  // One perfect shuffle of each 16 x 16 block of bytes: as an 8-bit number, an element's place rotates left by one.
  // Four of them swap the row's four bits with the column's.
  static void Interleave(const __m256i (&in)[16], __m256i (&out)[16]) {
    for (int r = 0; r < 8; ++r) {
      out[2 * r] = _mm256_unpacklo_epi8(in[r], in[r + 8]);
      out[2 * r + 1] = _mm256_unpackhi_epi8(in[r], in[r + 8]);
    }
  }
};

}  // namespace

const KernelTable kAvx2Kernels = MakeTable<Avx2Blocks>("avx2");

}  // namespace jaxfp8::cpu
