// A kernel as the parser leaves it: instructions over numbered registers.
#ifndef JAXFP8_TESTS_CUDA_PTX_PROGRAM_H_
#define JAXFP8_TESTS_CUDA_PTX_PROGRAM_H_

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace ptx {

constexpr int kLanes = 32;
// Where addresses of shared memory and of parameters begin. Shared memory has low addresses, as on a GPU.
constexpr uint64_t kSharedBase = 1024;
constexpr uint64_t kParameterBase = 0x00002000'a5000000;
// The register that operands which an instruction does not have read: 0.
constexpr int kNoRegister = 0;

class Warp;
struct Instruction;

// Runs an instruction for the lanes of a mask.
using Action = void (*)(Warp&, const Instruction&, uint32_t lanes);

enum class Flow : uint8_t {
  kNext,       // the instruction concerns its thread only
  kBranch,     // to `target`
  kReturn,     //
  kBarrier,    // waits for the block
  kCollective, // waits for the lanes of a mask, which is its first source
  kWait        // for a phase of an mbarrier
};

struct Instruction {
  Action action = nullptr;
  Flow flow = Flow::kNext;
  int line = 0;
  int guard = -1;  // the predicate register of @p; -1 without
  bool guard_is_negated = false;
  int target = -1;
  std::array<int, 4> to = {-1, -1, -1, -1};  // -1: there is no such result, or it is `_`
  std::array<int, 12> from = {};             // kNoRegister where there is no such operand
  int64_t offset = 0;                        // of the address [register + offset]
  int bits = 0;                              // of each element
  int elements = 1;
  bool is_signed = false, is_non_coherent = false;
  std::vector<int> sums;  // of wgmma, registers that are read and written
};

struct Variable {
  std::string name;
  int bytes, align;  // 0 bytes: as many as the launch gives
  uint64_t address;  // of a parameter: from the first one on
};

struct Kernel {
  std::string name, file;
  std::vector<Variable> parameters, shared;
  int parameter_bytes = 0;
  uint64_t shared_end = 0;
  uint32_t max_threads = 0;
  std::vector<Instruction> code;
  int registers = 0;
  std::vector<std::pair<int, uint64_t>> constants;  // register, value
  // Registers of %tid.x and others; -1 where the kernel does not read it.
  int thread_index = -1, block_index = -1, block_size = -1, grid_size = -1, lane_index = -1;
};

// Reads the files of a folder, `<name>/<name>.ptx`, from the next launch on.
void UseFolder(const std::string& folder);
// The kernel with a mangled name; parsed when it is asked for first.
const Kernel& FindKernel(const std::string& name);
// Text of a line, for messages.
std::string LineOf(const Kernel& kernel, int line);
// Parses all kernels of the folder; their number.
int ParseAll();

}  // namespace ptx

#endif  // JAXFP8_TESTS_CUDA_PTX_PROGRAM_H_
