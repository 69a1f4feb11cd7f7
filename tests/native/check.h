// CHECK: count what holds, print what does not, and fail the program at the end.
#ifndef JAXFP8_TESTS_NATIVE_CHECK_H_
#define JAXFP8_TESTS_NATIVE_CHECK_H_

#include <cstdint>
#include <cstdio>

namespace jaxfp8::test {

inline int64_t passed = 0;
inline int64_t failed = 0;

inline void Check(bool condition, const char* expression, const char* file, int line) {
  ++(condition ? passed : failed);
  if (!condition && failed <= 20) std::printf("%s:%d: %s does not hold\n", file, line, expression);
}

inline int Summary() {
  std::printf("%lld passed, %lld failed\n", static_cast<long long>(passed), static_cast<long long>(failed));
  return failed == 0 && passed > 0 ? 0 : 1;
}

}  // namespace jaxfp8::test

#define CHECK(condition) ::jaxfp8::test::Check((condition), #condition, __FILE__, __LINE__)

#endif  // JAXFP8_TESTS_NATIVE_CHECK_H_
