// Global and shared memory, and for every byte: who accessed it, whether it was written, whether a copy is under way.
//
// Time is counted in epochs: a barrier of a block, and every new block, begins one. Blocks run one after the other, so
// the epoch of an access tells its launch and its block.
#ifndef JAXFP8_TESTS_CUDA_PTX_MEMORY_H_
#define JAXFP8_TESTS_CUDA_PTX_MEMORY_H_

#include <array>
#include <cstdint>
#include <map>
#include <vector>

#include "bulk.h"

namespace ptx {

struct Clock {
  uint32_t now = 0, block_begin = 0, launch_begin = 0;
};
inline Clock epoch;

// The latest accesses to a byte. They throw a race where nothing orders them.
struct History {
  static constexpr uint32_t kAtomic = 0xffffffff, kSeveral = 0xfffffffe;

  uint32_t write_epoch = 0, writer = 0;  // threads count from 1; kAtomic: atomic operations of any thread
  uint32_t read_epoch = 0, reader = 0;   // kSeveral: more than one thread of the epoch
  uint32_t launch_of_other_readers = 0;  // the launch in which another block has read the byte

  void Read(uint32_t thread);
  void Write(uint32_t thread);

 private:
  bool IsAfterUnorderedWrite(uint32_t thread) const;
};

// ------------------------------------------------------------------------------------------------------ global memory
// Buffers are those of the tests. Bytes around them may not be touched.
void AddBuffer(const void* address, uint64_t bytes, bool is_written, bool is_writable);
void RemoveBuffer(const void* address);
// How many bytes of a buffer nobody has written.
int64_t Unwritten(const void* address);
// For memset and memcpy of the runtime: faults where [address, address + bytes) is no buffer that may be written.
void FillGlobal(uint64_t address, uint64_t bytes);
bool IsInBuffer(uint64_t address, uint64_t bytes);

// `undefined` gets a bit for every bit of `out` that nobody wrote.
void ReadGlobal(uint64_t address, uint32_t bytes, bool is_non_coherent, uint8_t* out, uint8_t* undefined);
void WriteGlobal(uint64_t address, uint32_t bytes, const uint8_t* data);
// The value before.
uint32_t AtomicMaxGlobal(uint64_t address, uint32_t value);

// ------------------------------------------------------------------------------------------------------ shared memory
struct Copy {  // cp.async
  uint64_t target, source;
  uint32_t bytes;
  uint32_t count;  // of source; zeros follow
  int line;
};

class SharedMemory {
 public:
  // Nothing is written yet. Variables are [address, address + bytes) with gaps between them.
  explicit SharedMemory(uint64_t end);
  void AddVariable(uint64_t address, int bytes);
  void BeginBlock();

  void Read(uint64_t address, uint32_t bytes, uint8_t* out, uint8_t* undefined);
  void Write(uint64_t address, uint32_t bytes, const uint8_t* data, const uint8_t* undefined);
  // 16 bytes, for the tensor cores, which are not ordered with what threads write (9.7.13.4, fence.proxy.async).
  void ReadByTensorCores(uint64_t address, uint8_t* out, uint8_t* undefined);
  // The thread of `position` orders what it has written.
  void Show();
  void Begin(const Copy& copy);
  // Copies arrive as late as they may: when their thread waits for them.
  void Arrive(const Copy& copy);

  // mbarrier and cp.async.bulk (bulk.cc), by the thread of `position`.
  void MakeBarrier(uint64_t address, uint32_t threads);
  void ArriveAt(uint64_t address, uint32_t bytes);
  bool HasEnded(uint64_t address, uint64_t parity);
  [[noreturn]] void RefuseToWait(uint64_t address);
  void Begin(const BoxCopy& copy);
  bool ArriveBox();
  void PassBarrier();
  // The chunk of 16 bytes that a product of the warp reads until it has ended.
  void ReadLater(uint64_t address);
  bool HasBarriers() const { return !barriers_.empty(); }
  bool HasBoxes() const { return !boxes_.empty(); }

 private:
  struct Byte {
    History history;
    uint32_t copier = 0;  // the thread whose copy is under way
    uint32_t shows = 0;   // of the writer, before it wrote
    uint8_t undefined = 0xff;
    bool is_of_box = false;
  };
  struct Chunk {
    uint64_t barrier = 0, phases = 0;  // that have to end before the latest box may be read
    std::array<uint32_t, kMostWarps> accesses = {};  // of each warp: its arrivals before the latest one
  };
  Barrier& BarrierAt(uint64_t address);
  void EndPhase(uint64_t address, Barrier& barrier);
  void Note(uint64_t address, uint32_t bytes);
  void Check(uint64_t address, uint32_t bytes, const char* access);

  std::vector<uint8_t> data_;
  std::vector<bool> is_variable_;
  std::vector<Byte> bytes_;
  struct Shows {
    uint32_t count = 0, last_epoch = 0;
  };
  std::vector<Shows> shows_;  // of each thread
  std::vector<Chunk> chunks_;
  std::map<uint64_t, Barrier> barriers_;
  std::vector<BoxCopy> boxes_;  // under way
  std::array<Past, kMostWarps> pasts_;
};

}  // namespace ptx

#endif  // JAXFP8_TESTS_CUDA_PTX_MEMORY_H_
