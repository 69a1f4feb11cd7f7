// How the work is cut: the index arithmetic of the launchers, in int64 throughout.
//
// Header-only and free of pointers, so that tests can ask about arrays of more than 2^31 elements without having one.
#ifndef JAXFP8_CPU_KERNELS_CHUNKS_H_
#define JAXFP8_CPU_KERNELS_CHUNKS_H_

#include <algorithm>
#include <cstdint>

namespace jaxfp8::cpu {

inline int64_t CeilDiv(int64_t a, int64_t b) { return a / b + (a % b != 0); }

// The order in which threads claim [0, count): `lanes` equal parts, one index of each in turn, so that every thread
// works its way through a part of its own. Threads side by side would take the same huge page of a fresh result from
// the system at the same time, and all but one of the pages would be cleared in vain.
class LaneOrder {
 public:
  LaneOrder(int64_t count, int64_t lanes) : count_(count), lanes_(lanes), length_(CeilDiv(count, lanes)) {}

  int64_t tickets() const { return lanes_ * length_; }

  // The index for ticket 0, 1, 2, ...; -1 where a lane has run out.
  int64_t At(int64_t ticket) const {
    const int64_t index = ticket % lanes_ * length_ + ticket / lanes_;
    return index < count_ ? index : -1;
  }

 private:
  int64_t count_;
  int64_t lanes_;
  int64_t length_;
};

// Cuts `groups` rows of `size` elements into chunks of about kElements: pieces of one row where rows are long, several
// whole rows where they are short.
class SpanChunks {
 public:
  // Large enough that claiming one (an atomic add) costs nothing, small enough that 1024x1024 keeps 16 threads busy.
  static constexpr int64_t kElements = 64 * 1024;

  struct Chunk {
    int64_t group_begin, group_end;
    int64_t begin, end;  // elements within each of these groups
  };

  SpanChunks(int64_t groups, int64_t size)
      : groups_(groups),
        size_(size),
        pieces_(std::max<int64_t>(1, CeilDiv(size, kElements))),
        groups_per_chunk_(std::max<int64_t>(1, size > 0 ? kElements / size : groups)) {}

  int64_t count() const {
    if (groups_ == 0 || size_ == 0) return 0;
    return pieces_ > 1 ? groups_ * pieces_ : CeilDiv(groups_, groups_per_chunk_);
  }

  Chunk At(int64_t index) const {
    if (pieces_ > 1) {
      const int64_t group = index / pieces_;
      const int64_t begin = index % pieces_ * kElements;
      return {group, group + 1, begin, std::min(size_, begin + kElements)};
    }
    const int64_t group = index * groups_per_chunk_;
    return {group, std::min(groups_, group + groups_per_chunk_), 0, size_};
  }

 private:
  int64_t groups_;
  int64_t size_;
  int64_t pieces_;
  int64_t groups_per_chunk_;
};

// Cuts `groups` matrices [m, n] into panels of at most kRows x kColumns, or of another size. They follow each other
// along a row of panels; a row further down begins further right, so that lanes that start in different rows also start
// in different columns, which are rows of the transposed result.
class PanelChunks {
 public:
  // The codes of a panel stay in the cache until they are transposed. Its rows fill two lines of each column of the
  // result: memory takes lines next to each other twice as fast as single ones.
  static constexpr int64_t kRows = 128;
  static constexpr int64_t kColumns = 512;

  struct Chunk {
    int64_t group;
    int64_t row_begin, row_end;
    int64_t column_begin, column_end;
  };

  PanelChunks(int64_t groups, int64_t m, int64_t n, int64_t rows = kRows, int64_t columns = kColumns)
      : groups_(groups),
        m_(m),
        n_(n),
        rows_(rows),
        columns_(columns),
        down_(CeilDiv(m, rows)),
        across_(CeilDiv(n, columns)) {}

  int64_t count() const { return groups_ * down_ * across_; }

  Chunk At(int64_t index) const {
    const int64_t down = index / across_ % down_;
    const int64_t first = down * across_ / down_;
    const int64_t row = down * rows_;
    const int64_t column = (first + index % across_) % across_ * columns_;
    return {index / across_ / down_, row, std::min(m_, row + rows_), column, std::min(n_, column + columns_)};
  }

 private:
  int64_t groups_;
  int64_t m_;
  int64_t n_;
  int64_t rows_;
  int64_t columns_;
  int64_t down_;
  int64_t across_;
};

}  // namespace jaxfp8::cpu

#endif  // JAXFP8_CPU_KERNELS_CHUNKS_H_
