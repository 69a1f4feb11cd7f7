// The products of a warp that run beside it (wgmma), and their sums, which belong to them until the warp waits.
#ifndef JAXFP8_TESTS_CUDA_PTX_PRODUCTS_H_
#define JAXFP8_TESTS_CUDA_PTX_PRODUCTS_H_

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "numbers.h"
#include "program.h"

namespace ptx {

struct Product {
  const Instruction* instruction;
  uint64_t a, b;  // descriptors
  bool adds;
  bool is_done = false;
};

// What becomes of registers.
struct Sums {
  std::vector<int> registers;
  std::vector<std::array<float, kLanes>> values;
  std::vector<std::array<bool, kLanes>> are_undefined;
};

struct Products {
  std::deque<std::vector<Product>> groups{1};  // the last is not committed yet
  std::map<int, Sums> sums;    // by the first of their registers
  bool is_ordered = false;  // by wgmma.fence, since the warp could last use sums
  uint64_t started = 0;

  bool IsPending() const { return !sums.empty(); }
};

}  // namespace ptx

#endif  // JAXFP8_TESTS_CUDA_PTX_PRODUCTS_H_
