// Scales of every kind of amax and stored scale, against divisions in double; also on a thread that flushes subnormals.
#include "cpu/kernels/amax_to_scale.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "tests/native/check.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace {

float Float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

bool SameBits(const std::vector<float>& a, const std::vector<float>& b) {
  return a.size() == b.size() && (a.empty() || std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0);
}

// A double has 53 >= 2 * 24 + 2 bits: rounding its quotient once more gives the correctly rounded float.
float ExpectedScale(double amax, double stored, double numerator) {
  if (amax < 0 || stored < 0) return Float(0x7fc00000u);
  constexpr double kLargest = std::numeric_limits<float>::max();
  if (amax > 0 && std::isfinite(amax)) {
    const double smallest = std::max(numerator / 0x1p126, 0x1p-126);
    const double largest = std::min(numerator / 0x1p-126, kLargest);
    return static_cast<float>(numerator / std::min(std::max(amax, smallest), largest));
  }
  if (stored > 0 && std::isfinite(stored)) {
    return static_cast<float>(1 / std::min(std::max(stored, 0x1p-126), 0x1p126));
  }
  return 1;
}

void CheckScales(const std::vector<float>& amax, const std::vector<float>& stored, float numerator) {
  const int64_t count = static_cast<int64_t>(amax.size());
  std::vector<float> expected(count), expected_inv(count), scale(count), scale_inv(count);
  bool normal = true;
  for (int64_t i = 0; i < count; ++i) {
    expected[i] = ExpectedScale(amax[i], stored[i], numerator);
    if (std::isnan(expected[i])) {
      expected_inv[i] = expected[i];
      continue;
    }
    expected_inv[i] = static_cast<float>(1 / static_cast<double>(expected[i]));
    normal = normal && std::isnormal(expected[i]) && std::isnormal(expected_inv[i]);
  }
  CHECK(normal);
  const auto run = [&] {
    std::fill(scale.begin(), scale.end(), -1.0f);
    std::fill(scale_inv.begin(), scale_inv.end(), -1.0f);
    jaxfp8::cpu::AmaxToScale({amax.data(), stored.data(), numerator, scale.data(), scale_inv.data(), count});
  };
  run();
  CHECK(SameBits(scale, expected));
  CHECK(SameBits(scale_inv, expected_inv));
#if defined(__x86_64__)
  const uint32_t before = _mm_getcsr();
  _mm_setcsr(before | 0x8040u);  // FTZ and DAZ, as on XLA's threads
  run();
  _mm_setcsr(before);
  CHECK(SameBits(scale, expected));
  CHECK(SameBits(scale_inv, expected_inv));
#endif
}

}  // namespace

int main() {
  std::mt19937 random(20240607);
  const float numerators[] = {448.0f,    57344.0f,    448 * 0x1p-20f, 57344 * 0x1p30f, 448 * 0x1p-64f,
                              0x1p-126f, 0x1.8p-126f, 1.0f,           0x1.000002p0f,   0x1.fffffep1f,
                              4.0f,      0x1p126f,    0x1.fffffep127f, 57344 * 0x1p64f};
  // Every sign and exponent, NaNs included; the same in another order for the other operand.
  std::vector<float> values;
  for (uint32_t exponent = 0; exponent < 512; ++exponent) {
    for (uint32_t mantissa : {0u, 1u, 0x7fffffu}) values.push_back(Float(exponent << 23 | mantissa));
    for (int i = 0; i < 40; ++i) values.push_back(Float(exponent << 23 | random() % (1u << 23)));
  }
  for (float numerator : numerators) {
    std::vector<float> stored = values;
    std::shuffle(stored.begin(), stored.end(), random);
    CheckScales(values, stored, numerator);
    CheckScales(std::vector<float>(values.size(), 0.0f), values, numerator);
    for (size_t count : {0, 1, 2, 5, 17}) {
      CheckScales({values.begin() + 777, values.begin() + 777 + count}, {stored.begin(), stored.begin() + count},
                  numerator);
    }
  }
  return jaxfp8::test::Summary();
}
