// Blocks with scales of their own: every instruction set gives the bytes of fp8.h and block_scale.h, for each element,
// and writes nothing else.
#include <algorithm>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "common/block_scale.h"
#include "cpu/kernels/half.h"
#include "cpu/kernels/kernel_table.h"
#include "cpu/kernels/quantize_blocks_transpose.h"
#include "tests/native/check.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace {

using namespace jaxfp8;
using namespace jaxfp8::cpu;

constexpr uint8_t kGuard = 0xa5;
constexpr int64_t kColumns = BlockBand::kColumns;
constexpr BlockScaling kScalings[] = {BlockScaling::kF32, BlockScaling::kF32PowerOf2, BlockScaling::kE8M0Ceil,
                                      BlockScaling::kE8M0Floor};

// A band of random bits, or of every 16-bit code.
template <class In>
std::vector<In> Values(int64_t size, bool all_codes, std::mt19937& random) {
  std::vector<In> x(size);
  for (int64_t i = 0; i < size; ++i) {
    const uint32_t bits = all_codes ? static_cast<uint32_t>(i) : static_cast<uint32_t>(random());
    memcpy(&x[i], &bits, sizeof(In));
  }
  return x;
}

template <class In, class Format>
void CheckBand(int dtype, int format, const std::vector<In>& x, int64_t rows, int64_t columns, int64_t width,
               int64_t first) {
  const int64_t n = columns + 3, stride = columns + 1;
  const BlockBand band = {x.data(), n, rows, columns, width, first};
  const auto block_of = [&](int64_t column) { return column < first ? 0 : 1 + (column - first) / width; };
  const int64_t count = block_of(columns - 1) + 1;
  std::vector<uint32_t> expected_amaxes(count);
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t column = 0; column < columns; ++column) {
      uint32_t& amax = expected_amaxes[block_of(column)];
      amax = std::max(amax, AmaxBits(Widen(x[row * n + column])));
    }
  }
  for (const KernelTable* table : SupportedKernels()) {
    uint32_t amaxes[kColumns + 1], scale_invs[kColumns + 1];
    amaxes[count] = scale_invs[count] = 12345;
    table->band_amaxes[dtype](band, amaxes);
    bool same = amaxes[count] == 12345;
    for (int64_t i = 0; i < count; ++i) same = same && std::min(amaxes[i], kInfBits) == expected_amaxes[i];
    CHECK(same);
    for (BlockScaling scaling : kScalings) {
      std::vector<uint8_t> codes(rows * stride, kGuard), expected(rows * stride, kGuard);
      table->quantize_band[dtype][format](band, scaling, amaxes, scale_invs, codes.data(), stride);
      same = scale_invs[count] == 12345;
      for (int64_t row = 0; row < rows; ++row) {
        for (int64_t column = 0; column < columns; ++column) {
          const BlockScale scale = AmaxToBlockScale<Format>(expected_amaxes[block_of(column)], scaling);
          expected[row * stride + column] = Quantize<Format>(Widen(x[row * n + column]), scale.factor);
          same = same && scale_invs[block_of(column)] == scale.scale_inv;
        }
      }
      CHECK(same);
      CHECK(codes == expected);
    }
  }
}

template <class In, class Format>
void CheckBands(int dtype, int format, std::mt19937& random) {
  const auto check = [&](int64_t rows, int64_t columns, int64_t width, int64_t first, bool all_codes = false) {
    CheckBand<In, Format>(dtype, format, Values<In>(rows * (columns + 3), all_codes, random), rows, columns, width,
                          first);
  };
  for (int64_t columns : {1, 2, 31, 32, 33, 63, 64, 65, 128, 200, 511, 512}) {
    for (int64_t width : {1, 2, 5, 31, 32, 33, 64, 128, 200, 512}) {
      for (int64_t rows : {1, 2, 5}) check(rows, columns, width, width);
      check(3, columns, width, 1 + width / 3);
    }
  }
  check(1, 5000, 6000, 5500);  // a long block, and a part of one
  check(1, 5000, 3000, 1);
  check(128, 509, 1, 1, true);  // every 16-bit code
  check(1, 512, 32, 32, true);
}

class NoThreads final : public TaskPool {
 public:
  int64_t num_threads() const override { return 0; }
  void Schedule(std::function<void()>) override {}
};

// On a thread that flushes subnormals, as XLA's do: IEEE results, and the thread's mode back afterwards.
void CheckFlushingThread() {
#if defined(__x86_64__)
  const uint32_t before = _mm_getcsr();
  const uint32_t flushing = before | 0x8040u;
  const float x[2] = {0x1p-130f, -0x1p-149f};
  uint8_t data[2], data_t[2], scale_inv[1], scale_inv_t[2];
  NoThreads pool;
  _mm_setcsr(flushing);
  QuantizeBlocksTranspose(pool, {Dtype::kF32, Dtype::kE4M3, BlockScaling::kE8M0Ceil, 1, 32, x, data, scale_inv, data_t,
                                 scale_inv_t, 1, 1, 2});
  const uint32_t after = _mm_getcsr();
  _mm_setcsr(before);
  CHECK(after == flushing);
  CHECK(scale_inv[0] == 0 && scale_inv_t[0] == 0 && scale_inv_t[1] == 0);
  CHECK(data[0] == 0x20 && data[1] == 0x80);  // 2^-3; 2^-22 is too small
  CHECK(memcmp(data, data_t, sizeof(data)) == 0);
#endif
}

}  // namespace

int main() {
  std::mt19937 random(20261123);
  CheckBands<BF16, E4M3>(0, 0, random);
  CheckBands<BF16, E5M2>(0, 1, random);
  CheckBands<F16, E4M3>(1, 0, random);
  CheckBands<F16, E5M2>(1, 1, random);
  CheckBands<F32, E4M3>(2, 0, random);
  CheckBands<F32, E5M2>(2, 1, random);
  CheckFlushingThread();
  return jaxfp8::test::Summary();
}
