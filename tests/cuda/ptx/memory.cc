#include "memory.h"

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <string>

#include "faults.h"

namespace ptx {
namespace {

struct Byte {
  History history;
  uint32_t non_coherent_epoch = 0;
  uint8_t undefined = 0xff;
};
struct Buffer {
  uint64_t begin, end;
  bool is_writable;
  std::vector<Byte> bytes;

  bool Has(uint64_t address, uint64_t size) const { return address >= begin && address + size <= end; }
};
std::map<uint64_t, std::unique_ptr<Buffer>> buffers;  // by their begin
Buffer* latest = nullptr;

Buffer* BufferAt(uint64_t address, uint64_t size) {
  if (latest && latest->Has(address, size)) return latest;
  auto after = buffers.upper_bound(address);
  if (after == buffers.begin()) return nullptr;
  Buffer* buffer = std::prev(after)->second.get();
  if (!buffer->Has(address, size)) return nullptr;
  return latest = buffer;
}

std::string Describe(uint64_t address) {
  auto after = buffers.upper_bound(address);
  std::string text = " at " + Hex(address);
  const auto add = [&](const Buffer& buffer) {
    text += ", byte " + std::to_string(static_cast<int64_t>(address - buffer.begin)) + " of a buffer of " +
            std::to_string(buffer.end - buffer.begin);
  };
  constexpr uint64_t kNear = 4096;
  if (after != buffers.begin() && address < std::prev(after)->second->end + kNear) {
    add(*std::prev(after)->second);
  } else if (after != buffers.end() && after->second->begin < address + kNear) {
    add(*after->second);
  }
  return text;
}

void CheckAlignment(uint64_t address, uint32_t bytes) {
  if (address % bytes != 0) Refuse("misaligned", Hex(address) + " is not a multiple of " + std::to_string(bytes));
}

Byte* Access(uint64_t address, uint32_t bytes, const char* access) {
  CheckAlignment(address, bytes);
  Buffer* buffer = BufferAt(address, bytes);
  if (!buffer) Refuse("outside", access + (" " + std::to_string(bytes)) + " bytes" + Describe(address));
  return &buffer->bytes[address - buffer->begin];
}

Byte* AccessForWriting(uint64_t address, uint32_t bytes) {
  Byte* first = Access(address, bytes, "writes");
  if (!latest->is_writable) Refuse("read-only", "writes to an operand" + Describe(address));
  for (Byte* byte = first; byte < first + bytes; ++byte) {
    if (byte->non_coherent_epoch >= epoch.launch_begin) {
      Refuse("nc", "writes to what this kernel reads by ld.global.nc" + Describe(address));
    }
  }
  return first;
}

bool IsOfOtherBlock(uint32_t time) { return time >= epoch.launch_begin && time < epoch.block_begin; }

uint32_t Me() { return position.thread + 1; }

}  // namespace

// Whether nothing orders an access of `thread` after the latest write. Threads of other blocks have the same numbers.
bool History::IsAfterUnorderedWrite(uint32_t thread) const {
  if (write_epoch < epoch.launch_begin || (writer == kAtomic && thread == kAtomic)) return false;
  if (writer == kAtomic || IsOfOtherBlock(write_epoch)) return true;
  return write_epoch == epoch.now && writer != thread;
}

void History::Read(uint32_t thread) {
  if (IsAfterUnorderedWrite(thread)) Refuse("race", "reads a byte that another thread writes");
  if (read_epoch == epoch.now) {
    if (reader != thread) reader = kSeveral;
    return;
  }
  if (IsOfOtherBlock(read_epoch)) launch_of_other_readers = epoch.launch_begin;
  read_epoch = epoch.now;
  reader = thread;
}

void History::Write(uint32_t thread) {
  if (IsAfterUnorderedWrite(thread)) Refuse("race", "writes to a byte that another thread writes");
  const bool has_other_readers = launch_of_other_readers == epoch.launch_begin || IsOfOtherBlock(read_epoch);
  if (has_other_readers || (read_epoch == epoch.now && reader != thread)) {
    Refuse("race", "writes to a byte that another thread reads");
  }
  write_epoch = epoch.now;
  writer = thread;
}

// ------------------------------------------------------------------------------------------------------ global memory

void AddBuffer(const void* address, uint64_t bytes, bool is_written, bool is_writable) {
  if (bytes == 0) return;
  auto buffer = std::make_unique<Buffer>();
  buffer->begin = reinterpret_cast<uint64_t>(address);
  buffer->end = buffer->begin + bytes;
  buffer->is_writable = is_writable;
  buffer->bytes.resize(bytes);
  if (is_written) {
    for (Byte& byte : buffer->bytes) byte.undefined = 0;
  }
  latest = nullptr;
  buffers[buffer->begin] = std::move(buffer);
}

void RemoveBuffer(const void* address) {
  latest = nullptr;
  buffers.erase(reinterpret_cast<uint64_t>(address));
}

int64_t Unwritten(const void* address) {
  const auto at = buffers.find(reinterpret_cast<uint64_t>(address));
  if (at == buffers.end()) return 0;
  const auto& bytes = at->second->bytes;
  return std::count_if(bytes.begin(), bytes.end(), [](const Byte& byte) { return byte.undefined != 0; });
}

void FillGlobal(uint64_t address, uint64_t bytes) {
  Buffer* buffer = BufferAt(address, bytes);
  if (!buffer) Refuse("outside", "the runtime writes " + std::to_string(bytes) + " bytes" + Describe(address));
  if (!buffer->is_writable) Refuse("read-only", "the runtime writes to an operand" + Describe(address));
  for (uint64_t i = 0; i < bytes; ++i) buffer->bytes[address - buffer->begin + i].undefined = 0;
}

bool IsInBuffer(uint64_t address, uint64_t bytes) { return BufferAt(address, bytes) != nullptr; }

void ReadGlobal(uint64_t address, uint32_t bytes, bool is_non_coherent, uint8_t* out, uint8_t* undefined) {
  Byte* byte = Access(address, bytes, "reads");
  for (uint32_t i = 0; i < bytes; ++i, ++byte) {
    if (is_non_coherent) {
      if (byte->history.write_epoch >= epoch.launch_begin) {
        Refuse("nc", "reads by ld.global.nc what this kernel writes" + Describe(address));
      }
      byte->non_coherent_epoch = epoch.now;
    }
    byte->history.Read(Me());
    undefined[i] = byte->undefined;
  }
  std::memcpy(out, reinterpret_cast<const void*>(address), bytes);
}

void WriteGlobal(uint64_t address, uint32_t bytes, const uint8_t* data) {
  Byte* byte = AccessForWriting(address, bytes);
  for (uint32_t i = 0; i < bytes; ++i, ++byte) {
    byte->history.Write(Me());
    byte->undefined = 0;
  }
  std::memcpy(reinterpret_cast<void*>(address), data, bytes);
}

uint32_t AtomicMaxGlobal(uint64_t address, uint32_t value) {
  Byte* byte = AccessForWriting(address, sizeof(value));
  for (uint32_t i = 0; i < sizeof(value); ++i, ++byte) {
    if (byte->undefined) Refuse("undefined", "an atomic operation on bytes that nobody wrote" + Describe(address));
    byte->history.Write(History::kAtomic);
  }
  uint32_t before;
  std::memcpy(&before, reinterpret_cast<const void*>(address), sizeof(before));
  value = std::max(before, value);
  std::memcpy(reinterpret_cast<void*>(address), &value, sizeof(value));
  return before;
}

// ------------------------------------------------------------------------------------------------------ shared memory

// History counts threads from 1; a block has at most 1024.
SharedMemory::SharedMemory(uint64_t end)
    : data_(end), is_variable_(end), bytes_(end), shows_(1025), chunks_(end / 16 + 1) {}

void SharedMemory::AddVariable(uint64_t address, int bytes) {
  std::fill_n(is_variable_.begin() + static_cast<int64_t>(address), bytes, true);
}

void SharedMemory::BeginBlock() {
  std::fill(bytes_.begin(), bytes_.end(), Byte());
  std::fill(shows_.begin(), shows_.end(), Shows());
  if (!barriers_.empty()) std::fill(chunks_.begin(), chunks_.end(), Chunk());
  barriers_.clear();
  boxes_.clear();
  pasts_.fill({});
  PassBarrier();
}

void SharedMemory::Check(uint64_t address, uint32_t bytes, const char* access) {
  CheckAlignment(address, bytes);
  bool is_inside = address + bytes <= data_.size();
  for (uint32_t i = 0; is_inside && i < bytes; ++i) is_inside = is_variable_[address + i];
  if (!is_inside) Refuse("outside", std::string(access) + " shared memory at " + Hex(address));
  for (uint32_t i = 0; i < bytes; ++i) {
    const uint32_t copier = bytes_[address + i].copier;
    if (copier != 0) {
      const std::string thread = std::to_string(copier - 1);
      Refuse("pending", std::string(access) + " shared memory while a copy of thread " + thread + " is under way");
    }
  }
}

void SharedMemory::Read(uint64_t address, uint32_t bytes, uint8_t* out, uint8_t* undefined) {
  Check(address, bytes, "reads");
  Note(address, bytes);
  for (uint32_t i = 0; i < bytes; ++i) {
    bytes_[address + i].history.Read(Me());
    undefined[i] = bytes_[address + i].undefined;
  }
  std::memcpy(out, &data_[address], bytes);
}

void SharedMemory::Write(uint64_t address, uint32_t bytes, const uint8_t* data, const uint8_t* undefined) {
  Check(address, bytes, "writes");
  Note(address, bytes);
  for (uint32_t i = 0; i < bytes; ++i) {
    bytes_[address + i].history.Write(Me());
    bytes_[address + i].is_of_box = false;
    bytes_[address + i].undefined = undefined[i];
    bytes_[address + i].shows = shows_[Me()].count;
  }
  std::memcpy(&data_[address], data, bytes);
}

void SharedMemory::ReadByTensorCores(uint64_t address, uint8_t* out, uint8_t* undefined) {
  Read(address, 16, out, undefined);
  for (uint32_t i = 0; i < 16; ++i) {
    const Byte& byte = bytes_[address + i];
    if (byte.undefined != 0 || byte.is_of_box) continue;
    const Shows& shows = shows_[byte.history.writer];
    const bool is_last = shows.count == byte.shows + 1;
    if (shows.count == byte.shows || (is_last && shows.last_epoch == epoch.now && byte.history.writer != Me())) {
      const std::string thread = std::to_string(byte.history.writer - 1);
      Refuse("proxy", "wgmma reads what thread " + thread + " wrote without fence.proxy.async before a barrier");
    }
  }
}

void SharedMemory::Show() { shows_[Me()] = {shows_[Me()].count + 1, epoch.now}; }

void SharedMemory::Begin(const Copy& copy) {
  Check(copy.target, copy.bytes, "copies to");
  CheckAlignment(copy.source, copy.bytes);
  for (uint32_t i = 0; i < copy.bytes; ++i) {
    bytes_[copy.target + i].history.Write(Me());
    bytes_[copy.target + i].copier = Me();
  }
}

void SharedMemory::Arrive(const Copy& copy) {
  uint8_t data[16] = {}, undefined[16] = {};
  uint8_t source[16], source_undefined[16];
  if (copy.count > 0) {
    // The manual reads no more than `count` bytes, which need not be a power of two.
    for (uint32_t i = 0; i < copy.count; ++i) {
      ReadGlobal(copy.source + i, 1, false, &source[i], &source_undefined[i]);
    }
    std::memcpy(data, source, copy.count);
    std::memcpy(undefined, source_undefined, copy.count);
  }
  for (uint32_t i = 0; i < copy.bytes; ++i) bytes_[copy.target + i].copier = 0;
  Write(copy.target, copy.bytes, data, undefined);
}

}  // namespace ptx
