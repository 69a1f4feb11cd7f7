// Barriers in shared memory (mbarrier) and copies of boxes that arrive at them (cp.async.bulk.tensor).
#ifndef JAXFP8_TESTS_CUDA_PTX_BULK_H_
#define JAXFP8_TESTS_CUDA_PTX_BULK_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <map>

namespace ptx {

constexpr uint32_t kMostWarps = 32;  // of a block

// What comes before the next instruction of a warp, beside what barriers of the block order: of each warp its accesses up to
// its n-th arrival, and the phases of barriers that have ended.
struct Past {
  std::array<uint32_t, kMostWarps> arrivals = {};
  std::map<uint64_t, uint64_t> phases;

  void Add(const Past& other) {
    for (size_t i = 0; i < kMostWarps; ++i) arrivals[i] = std::max(arrivals[i], other.arrivals[i]);
    for (const auto& [barrier, count] : other.phases) phases[barrier] = std::max(phases[barrier], count);
  }
  uint64_t PhasesOf(uint64_t barrier) const {
    const auto at = phases.find(barrier);
    return at == phases.end() ? 0 : at->second;
  }
};

struct Barrier {
  uint32_t threads, missing;
  int64_t bytes = 0;   // that are to come
  uint64_t phase = 0;  // how many have ended
  uint32_t maker, shows, epoch;
  Past arriving, ended;  // of the threads of this phase, and of the phases that have ended
};

// What the stand-in for cuTensorMapEncodeTiled writes into a map: bytes in three dimensions, the swizzle of 128 bytes.
struct TensorMap {
  static constexpr uint64_t kMark = 0x6d61'7020'6f66'2033;
  uint64_t mark, base, sizes[3], strides[2];
  uint32_t box[3];
};

struct BoxCopy {
  uint64_t target, barrier;
  TensorMap map;
  std::array<int64_t, 3> first;  // element of each dimension
  uint32_t thread;
  int line;

  uint32_t Bytes() const { return map.box[0] * map.box[1] * map.box[2]; }
};

}  // namespace ptx

#endif  // JAXFP8_TESTS_CUDA_PTX_BULK_H_
