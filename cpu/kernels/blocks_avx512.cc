// Blocks in AVX-512 (F, BW, DQ, VL): the instructions of vector_blocks.h on 16 lanes.
#include <immintrin.h>

#include <cstdint>

#include "cpu/kernels/kernel_table.h"
#include "cpu/kernels/vector_blocks.h"

namespace jaxfp8::cpu {
namespace {

struct Avx512 {
  using Int = __m512i;
  using Float = __m512;
  using Mask16 = __mmask32;
  using Mask32 = __mmask16;
  static constexpr int64_t kBytes = 64;

  static Int Load(const void* pointer) { return _mm512_loadu_si512(pointer); }
  static Float LoadFloats(const float* pointer) { return _mm512_loadu_ps(pointer); }
  static Int LoadBytesAs16(const uint8_t* pointer) {
    return _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(pointer)));
  }
  static void Save(void* pointer, Int value) { _mm512_storeu_si512(pointer, value); }
  static void Stream(void* pointer, Int value) { _mm512_stream_si512(static_cast<__m512i*>(pointer), value); }
  static void Fence() { _mm_sfence(); }

  static Int All(int32_t value) { return _mm512_set1_epi32(value); }
  static Int All16(int16_t value) { return _mm512_set1_epi16(value); }
  static Float AllFloats(float value) { return _mm512_set1_ps(value); }
  static Float AsFloats(Int x) { return _mm512_castsi512_ps(x); }
  static Int Bits(Float x) { return _mm512_castps_si512(x); }

  static Int And(Int a, Int b) { return _mm512_and_si512(a, b); }
  static Int Add(Int a, Int b) { return _mm512_add_epi32(a, b); }
  static Int Max(Int a, Int b) { return _mm512_max_epu32(a, b); }
  static Int Max16(Int a, Int b) { return _mm512_max_epu16(a, b); }
  static Float Times(Float a, Float b) { return _mm512_mul_ps(a, b); }
  static Float Plus(Float a, Float b) { return _mm512_add_ps(a, b); }
  static Float Min(Float a, Float b) { return _mm512_min_ps(a, b); }
  template <int kBits>
  static Int ShiftLeft(Int x) { return _mm512_slli_epi32(x, kBits); }
  template <int kBits>
  static Int ShiftRight(Int x) { return _mm512_srli_epi32(x, kBits); }
  template <int kBits>
  static Int ShiftLeft16(Int x) { return _mm512_slli_epi16(x, kBits); }
  template <int kBits>
  static Int ShiftRight16(Int x) { return _mm512_srli_epi16(x, kBits); }
  template <int kBits>
  static Int ShiftRightSigned16(Int x) { return _mm512_srai_epi16(x, kBits); }

  // Bits of a where mask has ones, of b elsewhere; lanes of a where a mask holds, of b elsewhere.
  static Int Select(Int mask, Int a, Int b) { return _mm512_ternarylogic_epi32(mask, a, b, 0xca); }
  static Int Blend(Mask32 mask, Int a, Int b) { return _mm512_mask_blend_epi32(mask, b, a); }
  static Int Blend16(Mask16 mask, Int a, Int b) { return _mm512_mask_blend_epi16(mask, b, a); }
  static Mask32 Greater(Int a, Int b) { return _mm512_cmpgt_epu32_mask(a, b); }
  static Mask16 Greater16(Int a, Int b) { return _mm512_cmpgt_epu16_mask(a, b); }
  static Mask32 LowMask(Mask16 mask) { return static_cast<Mask32>(mask); }
  static Mask32 HighMask(Mask16 mask) { return static_cast<Mask32>(mask >> 16); }

  static uint32_t Largest(Int x) { return _mm512_reduce_max_epu32(x); }
  static uint32_t Largest16(Int x) {
    const __m256i half = _mm256_max_epu16(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64(x, 1));
    return _mm512_reduce_max_epu32(_mm512_cvtepu16_epi32(half));
  }

  static float FromHalf(uint32_t bits) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(static_cast<int>(bits))));
  }
  static Float LowHalves(Int x) { return _mm512_cvtph_ps(_mm512_castsi512_si256(x)); }
  static Float HighHalves(Int x) { return _mm512_cvtph_ps(_mm512_extracti64x4_epi64(x, 1)); }
  static Int ToHalves(Float low, Float high) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return Join(_mm512_cvtps_ph(low, kNearest), _mm512_cvtps_ph(high, kNearest));
  }
  static Int Narrow(Int low, Int high) { return Join(_mm512_cvtepi32_epi16(low), _mm512_cvtepi32_epi16(high)); }
  static Int Join(__m256i low, __m256i high) { return _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1); }

  static Float EvenFloats(Float a, Float b) { return EveryOther(a, b, 0); }
  static Float OddFloats(Float a, Float b) { return EveryOther(a, b, 1); }
  static Float EveryOther(Float a, Float b, int first) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    return _mm512_permutex2var_ps(a, _mm512_add_epi32(even, _mm512_set1_epi32(first)), b);
  }
  static Int EvenAndOdd(Int even, Int odd) { return Select(_mm512_set1_epi32(0xffff), even, odd); }

  // Packing works within 128 bits: 32-bit word 4 * l + i of the four vectors packed is word l of vector i.
  static Int Pack32(Int a, Int b) { return _mm512_packus_epi32(a, b); }
  static Int Pack16(Int a, Int b) { return _mm512_packus_epi16(a, b); }
  static Int InOrder32(Int packed) {
    return _mm512_permutexvar_epi32(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), packed);
  }
  static Int InOrder64(Int packed) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), packed);
  }

  static Int InterleaveLow8(Int a, Int b) { return _mm512_unpacklo_epi8(a, b); }
  static Int InterleaveHigh8(Int a, Int b) { return _mm512_unpackhi_epi8(a, b); }

  // Calls write(row, byte, vector) for each 128 bits of a, b, c and d together: rows 0, 16, 32 and 48.
  template <class WriteRow>
  static void ForRows(Int a, Int b, Int c, Int d, WriteRow write) {
    const Int even_ab = _mm512_shuffle_i32x4(a, b, 0x88), odd_ab = _mm512_shuffle_i32x4(a, b, 0xdd);
    const Int even_cd = _mm512_shuffle_i32x4(c, d, 0x88), odd_cd = _mm512_shuffle_i32x4(c, d, 0xdd);
    write(0, 0, _mm512_shuffle_i32x4(even_ab, even_cd, 0x88));
    write(16, 0, _mm512_shuffle_i32x4(odd_ab, odd_cd, 0x88));
    write(32, 0, _mm512_shuffle_i32x4(even_ab, even_cd, 0xdd));
    write(48, 0, _mm512_shuffle_i32x4(odd_ab, odd_cd, 0xdd));
  }
};

}  // namespace

const KernelTable kAvx512Kernels = MakeTable<VectorBlocks<Avx512>>("avx512");

}  // namespace jaxfp8::cpu
