// Chunks cover every element exactly once, also where a size or an offset exceeds 2^31.
#include "cpu/kernels/chunks.h"

#include <cstdint>
#include <limits>
#include <vector>

#include "tests/native/check.h"

namespace {

using jaxfp8::cpu::CeilDiv;
using jaxfp8::cpu::LaneOrder;
using jaxfp8::cpu::PanelChunks;
using jaxfp8::cpu::SpanChunks;

void CheckSpansCover(int64_t groups, int64_t size) {
  const SpanChunks chunks(groups, size);
  std::vector<int> seen(groups * size);
  for (int64_t i = 0; i < chunks.count(); ++i) {
    const auto chunk = chunks.At(i);
    for (int64_t group = chunk.group_begin; group < chunk.group_end; ++group) {
      for (int64_t element = chunk.begin; element < chunk.end; ++element) ++seen.at(group * size + element);
    }
  }
  bool once = true;
  for (int times : seen) once = once && times == 1;
  CHECK(once);
}

void CheckPanelsCover(int64_t groups, int64_t m, int64_t n) {
  const PanelChunks chunks(groups, m, n);
  std::vector<int> seen(groups * m * n);
  for (int64_t i = 0; i < chunks.count(); ++i) {
    const auto chunk = chunks.At(i);
    for (int64_t row = chunk.row_begin; row < chunk.row_end; ++row) {
      for (int64_t column = chunk.column_begin; column < chunk.column_end; ++column) {
        ++seen.at((chunk.group * m + row) * n + column);
      }
    }
  }
  bool once = true;
  for (int times : seen) once = once && times == 1;
  CHECK(once);
}

void CheckLanes(int64_t count, int64_t lanes) {
  const LaneOrder order(count, lanes);
  std::vector<int> seen(count);
  for (int64_t ticket = 0; ticket < order.tickets(); ++ticket) {
    const int64_t index = order.At(ticket);
    if (index >= 0) ++seen.at(index);
  }
  bool once = true;
  for (int times : seen) once = once && times == 1;
  CHECK(once);
}

// Consecutive chunks must continue each other: with the first and the last that is the whole array.
void CheckLargeSpan(int64_t groups, int64_t size) {
  const SpanChunks chunks(groups, size);
  const int64_t count = chunks.count();
  CHECK(chunks.At(0).group_begin == 0 && chunks.At(0).begin == 0);
  CHECK(chunks.At(count - 1).group_end == groups && chunks.At(count - 1).end == size);
  for (int64_t i : {int64_t{0}, count / 3, count / 2, count - 2}) {
    const auto here = chunks.At(i);
    const auto next = chunks.At(i + 1);
    const bool same_group = next.group_begin == here.group_begin && next.begin == here.end;
    const bool next_group = next.group_begin == here.group_end && here.end == size && next.begin == 0;
    CHECK(same_group || next_group);
    CHECK(here.begin < here.end && here.end <= size);
  }
}

void CheckLargePanels(int64_t groups, int64_t m, int64_t n) {
  const PanelChunks chunks(groups, m, n);
  const int64_t count = chunks.count();
  const auto first = chunks.At(0);
  const auto last = chunks.At(count - 1);
  CHECK(first.group == 0 && first.row_begin == 0 && first.column_begin == 0);
  CHECK(last.group == groups - 1 && last.row_end == m);
  for (int64_t i : {count / 3, count / 2, count - 2}) {
    const auto here = chunks.At(i);
    const auto next = chunks.At(i + 1);
    const bool same_row = next.group == here.group && next.row_begin == here.row_begin;
    const bool next_column = next.column_begin == here.column_end || (here.column_end == n && next.column_begin == 0);
    const bool next_row = next.group == here.group && next.row_begin == here.row_end;
    const bool next_group = here.row_end == m && next.group == here.group + 1 && next.row_begin == 0;
    CHECK((same_row && next_column) || next_row || next_group);
    CHECK(here.row_begin < here.row_end && here.row_end <= m);
    CHECK(here.column_begin < here.column_end && here.column_end <= n);
  }
}

}  // namespace

int main() {
  constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
  CHECK(CeilDiv(0, 64) == 0);
  CHECK(CeilDiv(1, 64) == 1);
  CHECK(CeilDiv(kLargest, 2) == kLargest / 2 + 1);

  for (int64_t size : {0, 1, 63, 64, 65, 1000, 65535, 65536, 65537, 200000}) {
    for (int64_t groups : {0, 1, 2, 3}) CheckSpansCover(groups, size);
  }
  CheckSpansCover(100000, 1);
  CheckSpansCover(1000, 100);
  for (int64_t m : {0, 1, 63, 64, 65, 200}) {
    for (int64_t n : {0, 1, 64, 1023, 1024, 1025, 3000}) {
      for (int64_t groups : {0, 1, 3}) CheckPanelsCover(groups, m, n);
    }
  }

  for (int64_t count : {0, 1, 2, 7, 64, 1000}) {
    for (int64_t lanes : {1, 2, 3, 16}) CheckLanes(count, lanes);
  }

  constexpr int64_t k2To31 = int64_t{1} << 31;
  CheckLargeSpan(1, k2To31 + 1);
  CheckLargeSpan(1, 5 * k2To31 - 7);
  CheckLargeSpan(3, k2To31 + 64);
  CheckLargeSpan(k2To31 + 5, 3);
  CheckLargeSpan(1, kLargest / 4);
  CheckLargePanels(1, k2To31 + 3, 5);
  CheckLargePanels(1, 5, k2To31 + 3);
  CheckLargePanels(3, 100001, 100003);
  CheckLargePanels(k2To31 + 1, 2, 2);
  CHECK(LaneOrder(k2To31 + 7, 4).tickets() == k2To31 + 8);
  CHECK(LaneOrder(k2To31 + 8, 4).At(k2To31 + 7) == k2To31 + 7);
  CHECK(LaneOrder(k2To31 + 7, 4).At(k2To31 + 7) == -1);
  return jaxfp8::test::Summary();
}
