// Checks that stay in release builds and say what was wrong, with file and line.
#pragma once

#include <sstream>
#include <stdexcept>

namespace far {

template <class... Parts>
[[noreturn]] void fail(const char* file, int line, const Parts&... parts) {
  std::ostringstream text;
  (text << ... << parts);
  text << " (" << file << ":" << line << ")";
  throw std::runtime_error(text.str());
}

}  // namespace far

#define FAR_REQUIRE(condition, ...) \
  do {                              \
    if (!(condition)) ::far::fail(__FILE__, __LINE__, __VA_ARGS__); \
  } while (0)

#define FAR_CUDA_CHECK(call)                                                        \
  do {                                                                              \
    cudaError_t far_error = (call);                                                 \
    FAR_REQUIRE(far_error == cudaSuccess, #call ": ", cudaGetErrorString(far_error)); \
  } while (0)
