// Every instruction set this processor has gives the bytes of fp8.h, element by element.
//
// The expectation is the scalar codec applied to one element at a time; the tables under test include the portable one.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <type_traits>
#include <vector>

#include "common/fp8.h"
#include "cpu/kernels/amax.h"
#include "cpu/kernels/chunks.h"
#include "cpu/kernels/dequantize.h"
#include "cpu/kernels/half.h"
#include "cpu/kernels/kernel_table.h"
#include "cpu/kernels/quantize.h"
#include "cpu/kernels/quantize_transpose.h"
#include "tests/native/check.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace {

using namespace jaxfp8;
using namespace jaxfp8::cpu;

template <class T>
constexpr Dtype kDtype = std::is_same_v<T, BF16>   ? Dtype::kBF16
                         : std::is_same_v<T, F16>  ? Dtype::kF16
                         : std::is_same_v<T, F32>  ? Dtype::kF32
                         : std::is_same_v<T, E4M3> ? Dtype::kE4M3
                                                   : Dtype::kE5M2;

const float kScales[] = {1.0f,     0.5f,      3.0f,      0.1f,       448.0f,    57344.0f, 1.0f / 3, 0x1p126f, 0x1p-126f,
                         0x1p-140f, 0x1.8p40f, 0x1p-40f, 0x1.fffffep127f, 0x1p-149f, 123.456f, 0.0f};
const float kOddScales[] = {-1.0f, -0.0f, BitsToFloat(kInfBits), -BitsToFloat(kInfBits), BitsToFloat(0x7fc00000u)};

constexpr uint8_t kGuard = 0xa5;

// A vector of `size` elements of T that begins `shift` elements after a cache line, between guards.
template <class T>
class Shifted {
 public:
  Shifted(int64_t size, int64_t shift) : bytes_((size + shift + 64) * sizeof(T) + 128, kGuard), size_(size) {
    uint8_t* line = bytes_.data() + 64 - reinterpret_cast<uintptr_t>(bytes_.data()) % 64;
    data_ = reinterpret_cast<T*>(line) + shift;
  }
  T* data() { return data_; }
  bool GuardsIntact() const {
    const uint8_t* begin = reinterpret_cast<const uint8_t*>(data_);
    const uint8_t* end = begin + size_ * sizeof(T);
    const auto intact = [](uint8_t byte) { return byte == kGuard; };
    return std::all_of(bytes_.data(), begin, intact) && std::all_of(end, bytes_.data() + bytes_.size(), intact);
  }

 private:
  std::vector<uint8_t> bytes_;
  int64_t size_;
  T* data_;
};

template <class In>
uint32_t ExpectedAmax(const In* x, int64_t size) {
  uint32_t amax = 0;
  for (int64_t i = 0; i < size; ++i) amax = std::max(amax, AmaxBits(Widen(x[i])));
  return amax;
}

template <class In, class Format>
void CheckQuantize(const std::vector<In>& x, float scale) {
  const int64_t size = static_cast<int64_t>(x.size());
  std::vector<uint8_t> expected(size), got(size);
  for (int64_t i = 0; i < size; ++i) expected[i] = Quantize<Format>(Widen(x[i]), scale);
  const uint32_t amax = ExpectedAmax(x.data(), size);
  for (const KernelTable* table : SupportedKernels()) {
    if (table != &kPortableKernels && &KernelsForQuantize(scale) == &kPortableKernels) continue;
    std::fill(got.begin(), got.end(), kGuard);
    const auto kernel = table->quantize[HighPrecisionIndex(kDtype<In>)][Fp8Index(kDtype<Format>)];
    CHECK(kernel(x.data(), scale, got.data(), size, Store::kCached) == amax);
    CHECK(got == expected);
    CHECK(table->amax[HighPrecisionIndex(kDtype<In>)](x.data(), size) == amax);
  }
}

template <class In>
std::vector<In> All16() {
  std::vector<In> x(65536);
  for (uint32_t i = 0; i < 65536; ++i) x[i].bits = static_cast<uint16_t>(i);
  return x;
}

// Every value and every midpoint of the format, divided by the scale, with the floats next to it; both signs.
template <class Format>
std::vector<float> Midpoints(float scale) {
  std::vector<float> x;
  for (uint32_t code = 0; code <= Format::kMaxCode; ++code) {
    const float low = Decode<Format>(static_cast<uint8_t>(code));
    const float high = code < Format::kMaxCode ? Decode<Format>(static_cast<uint8_t>(code + 1)) : 2 * low;
    for (float y : {low, low + (high - low) / 2, low + (high - low) / 4}) {
      const uint32_t bits = FloatToBits(y / scale);
      for (uint32_t near = bits - 3; near != bits + 4; ++near) {
        x.push_back(BitsToFloat(near));
        x.push_back(BitsToFloat(near ^ 0x80000000u));
      }
    }
  }
  return x;
}

std::vector<float> RandomBits(int64_t size, std::mt19937& random) {
  std::vector<float> x(size);
  for (float& value : x) value = BitsToFloat(static_cast<uint32_t>(random()));
  return x;
}

template <class Format>
void CheckQuantizeValues(std::mt19937& random) {
  for (float scale : kScales) {
    CheckQuantize<BF16, Format>(All16<BF16>(), scale);
    CheckQuantize<F16, Format>(All16<F16>(), scale);
    CheckQuantize<F32, Format>(RandomBits(1 << 19, random), scale);
    CheckQuantize<F32, Format>(Midpoints<Format>(scale == 0 ? 1.0f : scale), scale);
  }
  for (float scale : kOddScales) {
    CheckQuantize<BF16, Format>(All16<BF16>(), scale);
    CheckQuantize<F16, Format>(All16<F16>(), scale);
    CheckQuantize<F32, Format>(RandomBits(1 << 12, random), scale);
  }
  std::uniform_int_distribution<uint32_t> scale_bits(1, kInfBits - 1);
  for (int i = 0; i < 60; ++i) {
    const float scale = BitsToFloat(scale_bits(random));
    CheckQuantize<BF16, Format>(All16<BF16>(), scale);
    CheckQuantize<F32, Format>(RandomBits(1 << 14, random), scale);
  }
}

template <class Format, class Out>
void CheckDequantizeValues(std::mt19937& random) {
  std::vector<uint8_t> codes(256);
  for (int i = 0; i < 256; ++i) codes[i] = static_cast<uint8_t>(i);
  std::vector<float> scales(std::begin(kScales), std::end(kScales));
  scales.insert(scales.end(), std::begin(kOddScales), std::end(kOddScales));
  for (int i = 0; i < 3000; ++i) scales.push_back(BitsToFloat(static_cast<uint32_t>(random())));
  for (float scale : scales) {
    std::vector<Out> expected(256), got(256);
    for (int i = 0; i < 256; ++i) expected[i] = Narrow<Out>(Decode<Format>(codes[i]) * scale);
    for (const KernelTable* table : SupportedKernels()) {
      if (table != &kPortableKernels && &KernelsForDequantize(scale) == &kPortableKernels) continue;
      const auto kernel = table->dequantize[Fp8Index(kDtype<Format>)][HighPrecisionIndex(kDtype<Out>)];
      kernel(codes.data(), scale, got.data(), 256, Store::kCached);
      CHECK(memcmp(got.data(), expected.data(), 256 * sizeof(Out)) == 0);
    }
  }
}

// All lengths and alignments, both kinds of store; nothing outside the result is written.
template <class In, class Format>
void CheckSpans(std::mt19937& random) {
  for (const KernelTable* table : SupportedKernels()) {
    const auto kernel = table->quantize[HighPrecisionIndex(kDtype<In>)][Fp8Index(kDtype<Format>)];
    const auto inverse = table->dequantize[Fp8Index(kDtype<Format>)][HighPrecisionIndex(kDtype<In>)];
    for (int64_t size = 0; size <= 200; ++size) {
      for (int64_t shift = 0; shift < 64; shift += size % 7 == 0 ? 1 : 13) {
        for (Store store : {Store::kCached, Store::kStreamed}) {
          Shifted<In> x(size, shift % 5), out(size, shift);
          Shifted<uint8_t> data(size, shift), codes(size, shift % 3);
          std::vector<uint8_t> expected(size);
          std::vector<In> decoded(size);
          for (int64_t i = 0; i < size; ++i) {
            const uint32_t bits = static_cast<uint32_t>(random());
            memcpy(x.data() + i, &bits, sizeof(In));
            codes.data()[i] = static_cast<uint8_t>(bits >> 16);
            expected[i] = Quantize<Format>(Widen(x.data()[i]), 3.0f);
            decoded[i] = Narrow<In>(Decode<Format>(codes.data()[i]) * 3.0f);
          }
          CHECK(kernel(x.data(), 3.0f, data.data(), size, store) == ExpectedAmax(x.data(), size));
          CHECK(std::equal(expected.begin(), expected.end(), data.data()));
          CHECK(data.GuardsIntact());
          inverse(codes.data(), 3.0f, out.data(), size, store);
          CHECK(size == 0 || memcmp(out.data(), decoded.data(), size * sizeof(In)) == 0);
          CHECK(out.GuardsIntact());
        }
      }
    }
  }
}

template <class In, class Format>
void CheckPanel(int64_t m, int64_t n, int64_t shift, std::mt19937& random) {
  Shifted<In> x(m * n, shift);
  std::vector<uint8_t> expected(m * n), expected_t(m * n);
  for (int64_t r = 0; r < m; ++r) {
    for (int64_t c = 0; c < n; ++c) {
      const uint32_t bits = static_cast<uint32_t>(random());
      memcpy(x.data() + r * n + c, &bits, sizeof(In));
      expected[r * n + c] = expected_t[c * m + r] = Quantize<Format>(Widen(x.data()[r * n + c]), 0.25f);
    }
  }
  for (const KernelTable* table : SupportedKernels()) {
    const auto kernel = table->quantize_transpose[HighPrecisionIndex(kDtype<In>)][Fp8Index(kDtype<Format>)];
    for (Store store : {Store::kCached, Store::kStreamed}) {
      Shifted<uint8_t> data(m * n, shift), data_t(m * n, shift);
      const PanelChunks chunks(1, m, n);
      uint32_t amax = 0;
      for (int64_t i = 0; i < chunks.count(); ++i) {
        const auto chunk = chunks.At(i);
        const int64_t offset = chunk.row_begin * n + chunk.column_begin;
        const int64_t offset_t = chunk.column_begin * m + chunk.row_begin;
        const Panel panel{x.data() + offset, data.data() + offset, data_t.data() + offset_t,
                          chunk.row_end - chunk.row_begin, chunk.column_end - chunk.column_begin, m, n};
        amax = std::max(amax, kernel(panel, 0.25f, store));
      }
      CHECK(amax == ExpectedAmax(x.data(), m * n));
      CHECK(std::equal(expected.begin(), expected.end(), data.data()) && data.GuardsIntact());
      CHECK(std::equal(expected_t.begin(), expected_t.end(), data_t.data()) && data_t.GuardsIntact());
    }
  }
}

// Every instruction set adds in the order of the rows, so that all round alike; infinities and NaN as in any sum.
template <class In>
void CheckColumnSums(int64_t m, int64_t n, std::mt19937& random) {
  std::vector<In> x(m * n);
  for (In& value : x) {
    const uint32_t bits = static_cast<uint32_t>(random());
    memcpy(&value, &bits, sizeof(In));
  }
  std::vector<float> expected(n, 0.0f);
  for (int64_t i = 0; i < m * n; ++i) expected[i % n] += Widen(x[i]);
  for (const KernelTable* table : SupportedKernels()) {
    Shifted<float> got(n, 1);
    const Panel panel{x.data(), nullptr, nullptr, m, n, m, n};
    table->column_sums[HighPrecisionIndex(kDtype<In>)](panel, got.data());
    bool same = true;
    for (int64_t i = 0; i < n; ++i) {
      const bool both_nan = std::isnan(expected[i]) && std::isnan(got.data()[i]);
      same = same && (both_nan || FloatToBits(expected[i]) == FloatToBits(got.data()[i]));
    }
    CHECK(same && got.GuardsIntact());
  }
}

template <class In, class Format>
void CheckPanels(std::mt19937& random) {
  for (int64_t m : {1, 2, 31, 63, 64, 65, 128, 191}) {
    for (int64_t n : {1, 3, 32, 63, 64, 65, 100, 128, 192, 512, 577, 1100}) {
      for (int64_t shift : {0, 1}) CheckPanel<In, Format>(m, n, shift, random);
      if (m <= PanelChunks::kRows) CheckColumnSums<In>(m, n, random);
    }
  }
}

class NoThreads final : public TaskPool {
 public:
  int64_t num_threads() const override { return 0; }
  void Schedule(std::function<void()>) override {}
};

// Launchers on a thread that flushes subnormals, as XLA's do: IEEE results, and the thread's mode back afterwards.
void CheckFlushingThread() {
#if defined(__x86_64__)
  const uint32_t before = _mm_getcsr();
  const uint32_t flushing = before | 0x8040u;
  const float x[2] = {0x1p-130f, -0x1p-149f};
  const float scales[2] = {0x1p126f, 0x1p-140f};
  const uint8_t codes[2] = {0x38, 0x01};  // 1 and 2^-9 in E4M3
  uint8_t data[2], data_t[2];
  const float so_far[2] = {};
  float amax[2], amax_t[2], out[2], column_sums[2];
  NoThreads pool;
  _mm_setcsr(flushing);
  Quantize(pool, {Dtype::kF32, Dtype::kE4M3, x, scales, 0, data, so_far, amax, 1, 2, 1});
  const TileParams tiles = {Dtype::kF32, Dtype::kE4M3, x, scales, 0, data, data_t, so_far, amax_t, 1, 2, 1, 1};
  QuantizeTranspose(pool, {tiles, column_sums});
  Dequantize(pool, {Dtype::kE4M3, Dtype::kF32, codes, scales + 1, 0, out, 1, 2});
  const uint32_t after = _mm_getcsr();
  _mm_setcsr(before);
  CHECK(after == flushing);
  CHECK(data[0] == 0x18 && data_t[0] == 0x18);  // 2^-4
  CHECK(data[1] == 0x80 && data_t[1] == 0x80);
  CHECK(FloatToBits(amax[0]) == FloatToBits(0x1p-130f) && FloatToBits(amax[1]) == 1);
  CHECK(memcmp(amax, amax_t, sizeof(amax)) == 0);
  CHECK(FloatToBits(column_sums[0]) == FloatToBits(0x1p-130f) && column_sums[1] == -0x1p-149f);
  CHECK(FloatToBits(out[0]) == FloatToBits(0x1p-140f) && FloatToBits(out[1]) == 1);
#endif
}

}  // namespace

int main() {
  std::mt19937 random(20240607);
  for (const KernelTable* table : SupportedKernels()) std::printf("testing %s\n", table->isa);
  CheckQuantizeValues<E4M3>(random);
  CheckQuantizeValues<E5M2>(random);
  const auto each_pair = [&](auto in, auto format) {
    using In = typename decltype(in)::type;
    using Format = typename decltype(format)::type;
    CheckDequantizeValues<Format, In>(random);
    CheckSpans<In, Format>(random);
    CheckPanels<In, Format>(random);
  };
  for (Dtype in : {Dtype::kBF16, Dtype::kF16, Dtype::kF32}) {
    for (Dtype format : {Dtype::kE4M3, Dtype::kE5M2}) {
      DispatchHighPrecision(in, [&](auto i) { DispatchFp8(format, [&](auto f) { each_pair(i, f); }); });
    }
  }
  CheckFlushingThread();
  return jaxfp8::test::Summary();
}
