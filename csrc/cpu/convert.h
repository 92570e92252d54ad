// Blocks of smaller floating-point numbers to and from float32, for loops that compute in float32.
#pragma once

#include <type_traits>

#include "kernels/number.h"
#include "launch.h"

namespace far {
namespace FAR_ISA {

// Where `n` floats from element `at` of an array lie: in the array itself if it is float32, else converted in `buffer`.
template <class Array>
static inline auto load_floats(Array* array, Dtype type, int64_t at, int64_t n, float* buffer)
    -> std::conditional_t<std::is_const_v<Array>, const float*, float*> {
  using Float = std::conditional_t<std::is_const_v<Array>, const float, float>;
  if (type == Dtype::f32) return static_cast<Float*>(array) + at;
  const uint16_t* small = static_cast<const uint16_t*>(array) + at;
  if (type == Dtype::bf16)
    for (int64_t i = 0; i < n; ++i) buffer[i] = bf16_to_float(small[i]);
  else
    for (int64_t i = 0; i < n; ++i) buffer[i] = f16_to_float(small[i]);
  return buffer;
}

// Writes `n` floats to element `at` and on, rounded to nearest.
static inline void store_floats(const float* __restrict__ values, void* array, Dtype type, int64_t at, int64_t n) {
  if (type == Dtype::f32) {
    float* __restrict__ to = static_cast<float*>(array) + at;
    for (int64_t i = 0; i < n; ++i) to[i] = values[i];
    return;
  }
  uint16_t* __restrict__ to = static_cast<uint16_t*>(array) + at;
  if (type == Dtype::bf16)
    for (int64_t i = 0; i < n; ++i) to[i] = float_to_bf16(values[i]);
  else
    for (int64_t i = 0; i < n; ++i) to[i] = float_to_f16(values[i]);
}

}  // namespace FAR_ISA
}  // namespace far
