// Blocks in AVX-512 (F, BW, DQ, VL): one code a 32-bit lane, combined to 16 and then 8 bits.
//
// What applies to all elements at once (amax, signs, NaN) is done in the widest form the input has: on 32 16-bit lanes
// for bf16 and f16. Signs are set aside first, so the rounding core only sees |x| * scale.
#include <immintrin.h>

#include <cstdint>
#include <type_traits>

#include "cpu/kernels/kernel_table.h"
#include "cpu/kernels/loops.h"
#include "cpu/kernels/rounding.h"

namespace jaxfp8::cpu {
namespace {

__m512i Load(const void* pointer) { return _mm512_loadu_si512(pointer); }

template <Store kStore>
void Write(void* pointer, __m512i value) {
  if constexpr (kStore == Store::kStreamed) {
    _mm512_stream_si512(static_cast<__m512i*>(pointer), value);
  } else {
    _mm512_storeu_si512(pointer, value);
  }
}

// The magnitudes of 16-bit floats from here on are not finite.
template <class In>
constexpr uint16_t kInf16 = 0x7f80;
template <>
constexpr uint16_t kInf16<F16> = 0x7c00;

// For In = BF16 or F16: 32 magnitudes.
template <class In>
struct Amax16 {
  void Add(__m512i magnitude) { lanes = _mm512_max_epu16(lanes, magnitude); }

  uint32_t Bits() const {
    const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(lanes), _mm512_extracti64x4_epi64(lanes, 1));
    const uint32_t amax = _mm512_reduce_max_epu32(_mm512_cvtepu16_epi32(half));
    if (amax >= kInf16<In>) return kInfBits;
    if constexpr (std::is_same_v<In, BF16>) return amax << 16;
    return FloatToBits(_mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(static_cast<int>(amax)))));
  }

  __m512i lanes = _mm512_setzero_si512();
};

struct Amax32 {
  void Add(__m512i magnitude) { lanes = _mm512_max_epu32(lanes, magnitude); }

  uint32_t Bits() const {
    const uint32_t amax = _mm512_reduce_max_epu32(lanes);
    return amax < kInfBits ? amax : kInfBits;
  }

  __m512i lanes = _mm512_setzero_si512();
};

template <class In>
using AmaxState = std::conditional_t<std::is_same_v<In, F32>, Amax32, Amax16<In>>;

__m512i Magnitude16(__m512i x) { return _mm512_and_si512(x, _mm512_set1_epi16(0x7fff)); }
__m512i Magnitude32(__m512i x) { return _mm512_and_si512(x, _mm512_set1_epi32(0x7fffffff)); }

// Bits of a where mask has ones, of b elsewhere.
__m512i Select(__m512i mask, __m512i a, __m512i b) { return _mm512_ternarylogic_epi32(mask, a, b, 0xca); }

// rounding.h on 16 lanes: the code of y >= 0 in the low 7 bits, rubbish above them.
template <class Format>
__m512i Round(__m512 y) {
  using R = Rounding<Format>;
  y = _mm512_min_ps(y, _mm512_castsi512_ps(_mm512_set1_epi32(R::kMaxBits)));
  const __m512i exponent = _mm512_and_si512(_mm512_castps_si512(y), _mm512_set1_epi32(0x7f800000));
  const __m512i e = _mm512_max_epu32(exponent, _mm512_set1_epi32(R::kMinNormalBits));
  const __m512 magic = _mm512_castsi512_ps(_mm512_add_epi32(e, _mm512_set1_epi32(R::kMagic)));
  return _mm512_add_epi32(_mm512_castps_si512(_mm512_add_ps(magic, y)), _mm512_srli_epi32(e, R::kShift));
}

// The scales of a block's elements: of 16 in a row from i on, or of every other of 32.
struct SameScale {
  explicit SameScale(float scale) : all(_mm512_set1_ps(scale)) {}
  __m512 Row(int64_t) const { return all; }
  __m512 Even(int64_t) const { return all; }
  __m512 Odd(int64_t) const { return all; }
  void Advance() {}

  __m512 all;
};

struct OwnScales {
  explicit OwnScales(const float* scales) : scales(scales) {}
  __m512 Row(int64_t i) const { return _mm512_loadu_ps(scales + i); }
  __m512 Even(int64_t i) const { return EveryOther(i, 0); }
  __m512 Odd(int64_t i) const { return EveryOther(i, 1); }
  void Advance() { scales += kBlock; }

  __m512 EveryOther(int64_t i, int first) const {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return _mm512_permutex2var_ps(Row(i), _mm512_add_epi32(even, _mm512_set1_epi32(first)), Row(i + 16));
  }

  const float* scales;
};

// 32 codes, in the low bytes of 16-bit lanes, of 32 16-bit inputs: elements i to i + 31 of a block.
template <class In, class Format, class Scales>
__m512i Codes16(__m512i x, __m512i magnitude, const Scales& scales, int64_t i) {
  __m512i rounded;
  if constexpr (std::is_same_v<In, BF16>) {
    // A bfloat16 in the upper half of a lane is a float: even and odd elements need one instruction each to get there.
    const __m512 even = _mm512_castsi512_ps(_mm512_slli_epi32(magnitude, 16));
    const __m512 odd = _mm512_castsi512_ps(_mm512_and_si512(magnitude, _mm512_set1_epi32(0xffff0000)));
    rounded = Select(_mm512_set1_epi32(0xffff), Round<Format>(_mm512_mul_ps(even, scales.Even(i))),
                     _mm512_slli_epi32(Round<Format>(_mm512_mul_ps(odd, scales.Odd(i))), 16));
  } else {
    const __m512 low = _mm512_cvtph_ps(_mm512_castsi512_si256(magnitude));
    const __m512 high = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(magnitude, 1));
    const __m256i low_codes = _mm512_cvtepi32_epi16(Round<Format>(_mm512_mul_ps(low, scales.Row(i))));
    const __m256i high_codes = _mm512_cvtepi32_epi16(Round<Format>(_mm512_mul_ps(high, scales.Row(i + 16))));
    rounded = _mm512_inserti64x4(_mm512_castsi256_si512(low_codes), high_codes, 1);
  }
  const __m512i codes = Select(_mm512_set1_epi16(0x7f), rounded, _mm512_srli_epi16(x, 8));
  const __mmask32 finite = _mm512_cmplt_epu16_mask(magnitude, _mm512_set1_epi16(kInf16<In>));
  return _mm512_mask_blend_epi16(finite, _mm512_set1_epi16(Format::kNanCode), codes);
}

// 16 codes, in the low bytes of 32-bit lanes, of 16 floats.
template <class Format>
__m512i Codes32(__m512i x, __m512i magnitude, __m512 scale) {
  const __m512i rounded = Round<Format>(_mm512_mul_ps(_mm512_castsi512_ps(magnitude), scale));
  const __m512i codes = Select(_mm512_set1_epi32(0x7f), rounded, _mm512_srli_epi32(x, 24));
  const __mmask16 finite = _mm512_cmplt_epu32_mask(magnitude, _mm512_set1_epi32(kInfBits));
  return _mm512_mask_blend_epi32(finite, _mm512_set1_epi32(Format::kNanCode), codes);
}

struct Avx512Blocks {
  template <class In>
  class Amax {
   public:
    void operator()(const In* x) {
      constexpr int64_t kLanes = 64 / sizeof(In);
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
      Write<kStore>(codes, Codes(x));
      scales_.Advance();
    }

    uint32_t AmaxBits() const { return amax_.Bits(); }

   private:
    __m512i Codes(const In* x) {
      if constexpr (std::is_same_v<In, F32>) {
        __m512i codes[4];
        for (int i = 0; i < 4; ++i) {
          const __m512i values = Load(x + 16 * i);
          const __m512i magnitude = Magnitude32(values);
          amax_.Add(magnitude);
          codes[i] = Codes32<Format>(values, magnitude, scales_.Row(16 * i));
        }
        const __m512i packed =
            _mm512_packus_epi16(_mm512_packus_epi32(codes[0], codes[1]), _mm512_packus_epi32(codes[2], codes[3]));
        // Packing works within 128 bits: 32-bit word 4 * l + i now holds the codes of lane l of codes[i].
        return _mm512_permutexvar_epi32(
            _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), packed);
      } else {
        __m512i codes[2];
        for (int i = 0; i < 2; ++i) {
          const __m512i values = Load(x + 32 * i);
          const __m512i magnitude = Magnitude16(values);
          amax_.Add(magnitude);
          codes[i] = Codes16<In, Format>(values, magnitude, scales_, 32 * i);
        }
        return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7),
                                        _mm512_packus_epi16(codes[0], codes[1]));
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
    explicit Dequantize(float scale_inv) : scale_inv_(_mm512_set1_ps(scale_inv * kFormatScale)) {}

    template <Store kStore>
    void operator()(const uint8_t* codes, Out* out) {
      for (int64_t i = 0; i < kBlock; i += 32) {
        const __m512i c = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(codes + i)));
        const __mmask32 nan = _mm512_cmpgt_epu16_mask(_mm512_and_si512(c, _mm512_set1_epi16(0x7f)),
                                                      _mm512_set1_epi16(kLastNumber));
        const __m512i half = AsF16(c);
        const __m512 low = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_castsi512_si256(half)), scale_inv_);
        const __m512 high = _mm512_mul_ps(_mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1)), scale_inv_);
        WriteNarrowed<kStore>(low, high, nan, out + i);
      }
    }

   private:
    // Both formats begin like float16: E5M2 is its upper byte, E4M3 is float16's upper bits of value * 2^-8.
    static constexpr bool kIsE5M2 = std::is_same_v<Format, E5M2>;
    static constexpr float kFormatScale = kIsE5M2 ? 1.0f : 256.0f;
    static constexpr uint16_t kLastNumber = kIsE5M2 ? 0x7c : 0x7e;

    static __m512i AsF16(__m512i codes) {
      const __m512i upper = _mm512_slli_epi16(codes, 8);
      if constexpr (kIsE5M2) return upper;
      return _mm512_and_si512(_mm512_srai_epi16(upper, 1), _mm512_set1_epi16(static_cast<int16_t>(0xbf80)));
    }

    // bfloat16 bits in the low half of each lane.
    static __m512i RoundToBF16(__m512 y) {
      const __m512i bits = _mm512_castps_si512(y);
      const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
      return _mm512_srli_epi32(_mm512_add_epi32(_mm512_add_epi32(bits, _mm512_set1_epi32(0x7fff)), odd), 16);
    }

    template <Store kStore>
    static void WriteNarrowed(__m512 low, __m512 high, __mmask32 nan, Out* out) {
      if constexpr (std::is_same_v<Out, F32>) {
        const __m512 quiet = _mm512_castsi512_ps(_mm512_set1_epi32(0x7fc00000));
        Write<kStore>(out, _mm512_castps_si512(_mm512_mask_mov_ps(low, static_cast<__mmask16>(nan), quiet)));
        Write<kStore>(out + 16, _mm512_castps_si512(_mm512_mask_mov_ps(high, nan >> 16, quiet)));
      } else if constexpr (std::is_same_v<Out, BF16>) {
        const __m512i packed = _mm512_packus_epi32(RoundToBF16(low), RoundToBF16(high));
        const __m512i ordered = _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), packed);
        Write<kStore>(out, _mm512_mask_mov_epi16(ordered, nan, _mm512_set1_epi16(0x7fc0)));
      } else {
        constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
        const __m512i packed = _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtps_ph(low, kNearest)),
                                                  _mm512_cvtps_ph(high, kNearest), 1);
        Write<kStore>(out, _mm512_mask_mov_epi16(packed, nan, _mm512_set1_epi16(0x7e00)));
      }
    }

    __m512 scale_inv_;
  };

  struct Copy {
    template <Store kStore>
    void operator()(const uint8_t* from, uint8_t* to) {
      Write<kStore>(to, Load(from));
    }
  };

  static void Fence() { _mm_sfence(); }

  template <Store kStore>
  static void TransposeTile(const uint8_t* tile, int64_t tile_stride, uint8_t* out, int64_t stride) {
    // bands[q][i]: columns i, 16 + i, 32 + i, 48 + i of rows 16 q to 16 q + 15, 16 bytes each.
    __m512i bands[4][16];
    for (int q = 0; q < 4; ++q) {
      __m512i a[16], b[16];
      for (int r = 0; r < 16; ++r) a[r] = Load(tile + (16 * q + r) * tile_stride);
      Interleave(a, b);
      Interleave(b, a);
      Interleave(a, b);
      Interleave(b, bands[q]);
    }
    for (int i = 0; i < 16; ++i) {
      const __m512i even01 = _mm512_shuffle_i32x4(bands[0][i], bands[1][i], 0x88);
      const __m512i odd01 = _mm512_shuffle_i32x4(bands[0][i], bands[1][i], 0xdd);
      const __m512i even23 = _mm512_shuffle_i32x4(bands[2][i], bands[3][i], 0x88);
      const __m512i odd23 = _mm512_shuffle_i32x4(bands[2][i], bands[3][i], 0xdd);
      Write<kStore>(out + i * stride, _mm512_shuffle_i32x4(even01, even23, 0x88));
      Write<kStore>(out + (16 + i) * stride, _mm512_shuffle_i32x4(odd01, odd23, 0x88));
      Write<kStore>(out + (32 + i) * stride, _mm512_shuffle_i32x4(even01, even23, 0xdd));
      Write<kStore>(out + (48 + i) * stride, _mm512_shuffle_i32x4(odd01, odd23, 0xdd));
    }
  }

 private:
  // One perfect shuffle of each 16 x 16 block of bytes: as an 8-bit number, an element's place rotates left by one.
  // Four of them swap the row's four bits with the column's.
  static void Interleave(const __m512i (&in)[16], __m512i (&out)[16]) {
    for (int r = 0; r < 8; ++r) {
      out[2 * r] = _mm512_unpacklo_epi8(in[r], in[r + 8]);
      out[2 * r + 1] = _mm512_unpackhi_epi8(in[r], in[r + 8]);
    }
  }
};

}  // namespace

const KernelTable kAvx512Kernels = MakeTable<Avx512Blocks>("avx512");

}  // namespace jaxfp8::cpu
