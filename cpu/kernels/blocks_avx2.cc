// Blocks in AVX2 and F16C: the instructions of vector_blocks.h on 8 lanes, with comparisons as vectors of ones.
#include <immintrin.h>

#include <cstdint>

#include "cpu/kernels/kernel_table.h"
#include "cpu/kernels/vector_blocks.h"

namespace jaxfp8::cpu {
namespace {

struct Avx2 {
  using Int = __m256i;
  using Float = __m256;
  using Mask16 = __m256i;
  using Mask32 = __m256i;
  static constexpr int64_t kBytes = 32;

  static Int Load(const void* pointer) { return _mm256_loadu_si256(static_cast<const __m256i*>(pointer)); }
  static Float LoadFloats(const float* pointer) { return _mm256_loadu_ps(pointer); }
  static Int LoadBytesAs16(const uint8_t* pointer) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(pointer)));
  }
  static void Save(void* pointer, Int value) { _mm256_storeu_si256(static_cast<__m256i*>(pointer), value); }
  static void Stream(void* pointer, Int value) { _mm256_stream_si256(static_cast<__m256i*>(pointer), value); }
  static void Fence() { _mm_sfence(); }

  static Int All(int32_t value) { return _mm256_set1_epi32(value); }
  static Int All16(int16_t value) { return _mm256_set1_epi16(value); }
  static Float AllFloats(float value) { return _mm256_set1_ps(value); }
  static Float AsFloats(Int x) { return _mm256_castsi256_ps(x); }
  static Int Bits(Float x) { return _mm256_castps_si256(x); }

  static Int And(Int a, Int b) { return _mm256_and_si256(a, b); }
  static Int Add(Int a, Int b) { return _mm256_add_epi32(a, b); }
  static Int Max(Int a, Int b) { return _mm256_max_epu32(a, b); }
  static Int Max16(Int a, Int b) { return _mm256_max_epu16(a, b); }
  static Float Times(Float a, Float b) { return _mm256_mul_ps(a, b); }
  static Float Plus(Float a, Float b) { return _mm256_add_ps(a, b); }
  static Float Min(Float a, Float b) { return _mm256_min_ps(a, b); }
  template <int kBits>
  static Int ShiftLeft(Int x) { return _mm256_slli_epi32(x, kBits); }
  template <int kBits>
  static Int ShiftRight(Int x) { return _mm256_srli_epi32(x, kBits); }
  template <int kBits>
  static Int ShiftLeft16(Int x) { return _mm256_slli_epi16(x, kBits); }
  template <int kBits>
  static Int ShiftRight16(Int x) { return _mm256_srli_epi16(x, kBits); }
  template <int kBits>
  static Int ShiftRightSigned16(Int x) { return _mm256_srai_epi16(x, kBits); }

  // Bits of a where mask has ones, of b elsewhere. Comparisons are signed: none of their operands is negative.
  static Int Select(Int mask, Int a, Int b) { return _mm256_or_si256(And(mask, a), _mm256_andnot_si256(mask, b)); }
  static Int Blend(Mask32 mask, Int a, Int b) { return _mm256_blendv_epi8(b, a, mask); }
  static Int Blend16(Mask16 mask, Int a, Int b) { return _mm256_blendv_epi8(b, a, mask); }
  static Mask32 Greater(Int a, Int b) { return _mm256_cmpgt_epi32(a, b); }
  static Mask16 Greater16(Int a, Int b) { return _mm256_cmpgt_epi16(a, b); }
  static Mask32 LowMask(Mask16 mask) { return _mm256_cvtepi16_epi32(_mm256_castsi256_si128(mask)); }
  static Mask32 HighMask(Mask16 mask) { return _mm256_cvtepi16_epi32(_mm256_extracti128_si256(mask, 1)); }

  static uint32_t Largest(Int x) { return LargestOf<uint32_t>(x); }
  static uint32_t Largest16(Int x) { return LargestOf<uint16_t>(x); }
  template <class Lane>
  static uint32_t LargestOf(Int x) {
    alignas(32) Lane values[kBytes / sizeof(Lane)];
    _mm256_store_si256(reinterpret_cast<__m256i*>(values), x);
    uint32_t largest = 0;
    for (uint32_t value : values) largest = value > largest ? value : largest;
    return largest;
  }

  static float FromHalf(uint32_t bits) {
    return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(static_cast<int>(bits))));
  }
  static Float LowHalves(Int x) { return _mm256_cvtph_ps(_mm256_castsi256_si128(x)); }
  static Float HighHalves(Int x) { return _mm256_cvtph_ps(_mm256_extracti128_si256(x, 1)); }
  static Int ToHalves(Float low, Float high) {
    constexpr int kNearest = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return _mm256_set_m128i(_mm256_cvtps_ph(high, kNearest), _mm256_cvtps_ph(low, kNearest));
  }
  // The low 7 bits of lanes; packing would saturate what is above them.
  static Int Narrow(Int low, Int high) { return InOrder64(Pack32(And(low, All(0x7f)), And(high, All(0x7f)))); }

  // A shuffle works within 128 bits, so the two 64-bit words in the middle are in each other's place.
  static Float EvenFloats(Float a, Float b) { return AsFloats(InOrder64(Bits(_mm256_shuffle_ps(a, b, 0x88)))); }
  static Float OddFloats(Float a, Float b) { return AsFloats(InOrder64(Bits(_mm256_shuffle_ps(a, b, 0xdd)))); }
  static Int EvenAndOdd(Int even, Int odd) { return _mm256_blend_epi16(even, odd, 0xaa); }

  // Packing works within 128 bits: 32-bit word 4 * l + i of the four vectors packed is word l of vector i.
  static Int Pack32(Int a, Int b) { return _mm256_packus_epi32(a, b); }
  static Int Pack16(Int a, Int b) { return _mm256_packus_epi16(a, b); }
  static Int InOrder32(Int packed) {
    return _mm256_permutevar8x32_epi32(packed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  }
  static Int InOrder64(Int packed) { return _mm256_permute4x64_epi64(packed, 0xd8); }

  static Int InterleaveLow8(Int a, Int b) { return _mm256_unpacklo_epi8(a, b); }
  static Int InterleaveHigh8(Int a, Int b) { return _mm256_unpackhi_epi8(a, b); }

  // Calls write(row, byte, vector) for each 128 bits of a, b, c and d together: rows 0 and 16.
  template <class WriteRow>
  static void ForRows(Int a, Int b, Int c, Int d, WriteRow write) {
    write(0, 0, _mm256_permute2x128_si256(a, b, 0x20));
    write(0, 32, _mm256_permute2x128_si256(c, d, 0x20));
    write(16, 0, _mm256_permute2x128_si256(a, b, 0x31));
    write(16, 32, _mm256_permute2x128_si256(c, d, 0x31));
  }
};

}  // namespace

const KernelTable kAvx2Kernels = MakeTable<VectorBlocks<Avx2>>("avx2");

}  // namespace jaxfp8::cpu
