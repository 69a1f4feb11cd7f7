// Moments in FP8: every instruction set gives the bytes of the portable one, however blocks are cut into chunks, in
// place or not, and a block that decodes to what it is given keeps its bytes. So does a step of Adam, which encodes all
// blocks. (tests/ops has the oracle.)
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "common/adam.h"
#include "common/moment.h"
#include "cpu/kernels/chunks.h"
#include "cpu/kernels/float_env.h"
#include "cpu/kernels/kernel_table.h"
#include "cpu/kernels/moments.h"
#include "tests/native/check.h"

namespace {

using namespace jaxfp8;
using namespace jaxfp8::cpu;

struct Moment {
  std::vector<uint8_t> data;
  std::vector<float> amax;
  std::vector<int8_t> exponent;

  bool operator==(const Moment& other) const {
    return data == other.data && exponent == other.exponent &&
           memcmp(amax.data(), other.amax.data(), amax.size() * sizeof(float)) == 0;
  }
};

// Random bits, or numbers of one size.
std::vector<float> Values(int64_t rows, int64_t n, bool any_bits, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> x(rows * n);
  for (int64_t row = 0; row < rows; ++row) {
    const int size = static_cast<int>(random() % 260) - 140;
    for (int64_t i = row * n; i < (row + 1) * n; ++i) {
      x[i] = any_bits ? BitsToFloat(static_cast<uint32_t>(random())) : std::ldexp(normal(random), size);
    }
  }
  return x;
}

void CheckMoment(int64_t rows, int64_t n, bool any_bits, bool squared, bool stochastic, std::mt19937& random) {
  const int64_t blocks = rows * CeilDiv(n, kMomentBlock);
  const std::vector<float> x = Values(rows, n, any_bits, random);
  std::vector<uint32_t> keys(blocks);
  for (uint32_t& key : keys) key = static_cast<uint32_t>(random());
  const Moment zeros = {std::vector<uint8_t>(rows * n), std::vector<float>(blocks), std::vector<int8_t>(blocks, 1)};

  const auto encode = [&](const KernelTable& table, const Moment& old, const std::vector<float>& after, Moment* next) {
    const EncodeMomentParams params = {old.data.data(),   old.amax.data(),   old.exponent.data(),
                                       after.data(),      stochastic ? keys.data() : nullptr,
                                       squared,           next->data.data(), next->amax.data(),
                                       next->exponent.data(), rows,          n};
    const ScopedFlush flush;
    for (int64_t block = 0; block < blocks; block += 3) {
      table.encode_moment(params, block, std::min(blocks, block + 3));
    }
  };
  const auto decode = [&](const KernelTable& table, const Moment& moment) {
    std::vector<float> out(rows * n);
    const ScopedFlush flush;
    table.decode_moment({moment.data.data(), moment.amax.data(), moment.exponent.data(), out.data(), rows, n}, 0, blocks);
    return out;
  };

  Moment expected = zeros;
  encode(kPortableKernels, zeros, x, &expected);
  const std::vector<float> decoded = decode(kPortableKernels, expected);
  for (const KernelTable* table : SupportedKernels()) {
    Moment got = zeros, in_place = zeros, kept = zeros;
    encode(*table, zeros, x, &got);
    CHECK(got == expected);
    encode(*table, in_place, x, &in_place);
    CHECK(in_place == expected);
    const std::vector<float> out = decode(*table, expected);
    CHECK(memcmp(out.data(), decoded.data(), out.size() * sizeof(float)) == 0);
    encode(*table, expected, decoded, &kept);
    CHECK(kept == expected);
  }
}

// Results of a step are in the place of operands, or not.
struct AdamState {
  std::vector<float> elements;  // the gradients or the parameters; the updates or the next parameters
  Moment mu, nu;

  bool operator==(const AdamState& other) const {
    const auto same = [](float x, float y) { return FloatToBits(x) == FloatToBits(y) || (x != x && y != y); };
    return mu == other.mu && nu == other.nu &&
           std::equal(elements.begin(), elements.end(), other.elements.begin(), same);
  }
};

void CheckAdam(int64_t rows, int64_t n, bool any_bits, bool apply, std::mt19937& random) {
  const int64_t blocks = rows * CeilDiv(n, kMomentBlock);
  const std::vector<float> grads = Values(rows, n, any_bits, random), params = Values(rows, n, any_bits, random);
  std::vector<uint32_t> keys(blocks);
  for (uint32_t& key : keys) key = static_cast<uint32_t>(random());
  const auto moment = [&](bool squared) {
    Moment some = {std::vector<uint8_t>(rows * n), std::vector<float>(blocks), std::vector<int8_t>(blocks)};
    for (uint8_t& code : some.data) {
      code = static_cast<uint8_t>(random());
      if (squared && code < 0xff) code &= 0x7f;
    }
    for (int64_t i = 0; i < blocks; ++i) {
      some.amax[i] = std::ldexp(1.0f, static_cast<int>(random() % 260) - 140);
      some.exponent[i] = static_cast<int8_t>(random() % 3) - 1;
    }
    return some;
  };
  const AdamState before = {apply ? params : grads, moment(false), moment(true)};
  const std::vector<float> hyper = {0.9f, 0.1f, 0.99f, 0.01f, 3.0f, 30.0f, 1e-12f, 1e-8f, 1e-3f, 0.1f, 0.5f,
                                    0.5f, 0.5f, 0.9f,  0.1f,  1.0f, 1.0f,  0.0f,   1e-8f, 1e-2f, 0.0f, 1.0f};
  const auto step = [&](const KernelTable& table, AdamState& next, const AdamState& old) {
    const auto of_moment = [&](const Moment& m, Moment& to) {
      return AdamMoment{m.data.data(),  m.amax.data(),  m.exponent.data(), keys.data(),
                        to.data.data(), to.amax.data(), to.exponent.data()};
    };
    const float* elements = old.elements.data();
    const AdamLeaf leaf = {apply ? grads.data() : elements,
                           apply ? elements : nullptr,
                           next.elements.data(),
                           of_moment(old.mu, next.mu),
                           of_moment(old.nu, next.nu),
                           hyper.data(),
                           rows,
                           n,
                           rows / 2};
    const ScopedFlush flush;
    for (int64_t block = 0; block < blocks; block += 3) {
      table.adam_update(leaf, block, std::min(blocks, block + 3));
    }
  };
  AdamState expected = before;
  step(kPortableKernels, expected, before);
  for (const KernelTable* table : SupportedKernels()) {
    AdamState got = before, in_place = before;
    step(*table, got, before);
    CHECK(got == expected);
    step(*table, in_place, in_place);
    CHECK(in_place == expected);
  }
}

}  // namespace

int main() {
  std::mt19937 random(1);
  for (int64_t n : {1, 64, 100, 128, 129, 300, 1024}) {
    for (int options = 0; options < 8; ++options) {
      CheckMoment(33, n, options & 1, options & 2, options & 4, random);
    }
    for (int options = 0; options < 4; ++options) CheckAdam(34, n, options & 1, options & 2, random);
  }
  return jaxfp8::test::Summary();
}
