// Entry points for tests/emulated.py: extern "C", seed first, null or the text of an exception as result.
#pragma once

#include <string>

#include "cuda/launch.cuh"

template <class Body>
const char* guarded(int64_t seed, Body body) {
  static std::string error;
#ifdef FAR_EMULATE_CUDA
  far::emulator::seed = uint64_t(seed);
#else
  (void)seed;
#endif
  try {
    body();
    return nullptr;
  } catch (const std::exception& e) {
    error = e.what();
    return error.c_str();
  }
}
