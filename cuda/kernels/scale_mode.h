// How an operand of a product is scaled, and where cuBLASLt expects the scales.
#ifndef JAXFP8_CUDA_KERNELS_SCALE_MODE_H_
#define JAXFP8_CUDA_KERNELS_SCALE_MODE_H_

#include <cstdint>

namespace jaxfp8::cuda {

// Scales of an operand [rows, k], one for each block of so many rows by so many elements along k. Layouts are row-major;
// scales are scale_invs.
enum class ScaleMode {
  kTensor,         // f32 [1]
  kRows,           // f32 [rows]: one for each row
  // E8M0 [rows in 128s, blocks in fours, 32, 4, 4]: of row r, block b at [r / 128, b / 4, r % 32, r % 128 / 32, b % 4].
  kBlocks1x32,
  kBlocks1x128,    // f32 [blocks, rows]
  kBlocks128x128,  // f32 [rows in 128s, blocks rounded up to a multiple of 4]
};

// Whether cuBLASLt has a product of operands scaled so, on some GPU: kRows and blocks of 128 on compute capability 9.0,
// kBlocks1x32 from 10.0 on.
constexpr bool AreMultiplied(ScaleMode a, ScaleMode b) {
  const auto is_128 = [](ScaleMode mode) {
    return mode == ScaleMode::kBlocks1x128 || mode == ScaleMode::kBlocks128x128;
  };
  return a == b ? a != ScaleMode::kBlocks128x128 : is_128(a) && is_128(b);
}

constexpr int64_t CeilDiv(int64_t x, int64_t y) { return x / y + (x % y != 0); }

// How many bytes the scales of one operand are.
constexpr int64_t ScaleBytes(ScaleMode mode, int64_t rows, int64_t k) {
  switch (mode) {
    case ScaleMode::kTensor: return sizeof(float);
    case ScaleMode::kRows: return rows * sizeof(float);
    case ScaleMode::kBlocks1x32: return CeilDiv(rows, 128) * CeilDiv(k, 128) * 512;
    case ScaleMode::kBlocks1x128: return CeilDiv(k, 128) * rows * sizeof(float);
    case ScaleMode::kBlocks128x128: return CeilDiv(rows, 128) * CeilDiv(CeilDiv(k, 128), 4) * 4 * sizeof(float);
  }
  return 0;
}

}  // namespace jaxfp8::cuda

#endif  // JAXFP8_CUDA_KERNELS_SCALE_MODE_H_
