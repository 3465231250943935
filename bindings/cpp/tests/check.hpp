// A check that counts and says where; a test program returns the count.
#ifndef VANWARD_TESTS_CHECK_HPP
#define VANWARD_TESTS_CHECK_HPP

#include <cmath>
#include <cstdio>

inline int failures = 0;

inline void check(bool holds, const char *what, const char *file, int line) {
  if (holds) return;
  ++failures;
  std::fprintf(stderr, "%s:%d: %s\n", file, line, what);
}

inline bool near(double found, double expected, double tolerance) { return std::fabs(found - expected) <= tolerance; }

#define CHECK(condition) check((condition), #condition, __FILE__, __LINE__)

#endif
