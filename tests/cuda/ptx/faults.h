// A fault: an access or an instruction that the manual forbids, or for which it defines nothing. The launch ends there.
//
//   outside     an access to memory that is no buffer, shared variable or parameter
//   misaligned  an address that is not a multiple of the size of its access
//   undefined   bits that nobody wrote decide a branch or an address, or are stored to global memory
//   read-only   a write to an operand
//   nc          a non-coherent load of bytes that the kernel writes
//   race        two threads, one of which writes, with no barrier between them
//   pending     an access to bytes on which an asynchronous copy is under way
//   barrier     threads at different barriers, or threads that ended before a barrier
//   warp        a .sync instruction that a lane of its mask does not reach
//   phase       an access to what a copy brings before its barrier, or a wait for a phase that never ends
//   count       a phase of a barrier with fewer or more bytes or threads than it expects
//   overwrite   a copy to shared memory that may still be read
//   registers   a setmaxnreg that the manual forbids
//   endless     a kernel that does not end
//   launch      a grid, a block or parameters that no launch may have
//   unknown     an instruction that the interpreter does not have
#ifndef JAXFP8_TESTS_CUDA_PTX_FAULTS_H_
#define JAXFP8_TESTS_CUDA_PTX_FAULTS_H_

#include <cstdint>
#include <string>

namespace ptx {

struct Kernel;

// The thread that runs and the line of its PTX.
struct Position {
  const Kernel* kernel = nullptr;
  int line = 0;
  uint32_t block = 0, thread = 0;
};
inline Position position;

struct Fault {
  std::string message;
};

// Throws the fault `kind` of `position`.
[[noreturn]] void Refuse(const std::string& kind, const std::string& reason);

std::string Hex(uint64_t value);

}  // namespace ptx

#endif  // JAXFP8_TESTS_CUDA_PTX_FAULTS_H_
