// Compiles the project's CUDA sources for the CPU and runs them thread by thread: g++ -x c++ -DFAR_EMULATE_CUDA.
// What the kernels of this project use is here, no more; how threads are run is in cuda_fibers.h.
//
// Shared memory comes in two forms. In a plain build its variables are thread_local: nothing else lies in the
// library's thread-local storage, so that its bounds are known, and every block finds it full of 0xff, which is NaN as
// a floating point number and -1 as an integer. AddressSanitizer puts no red zones around thread-local variables;
// under it they are static, keep what the last block left, and overruns are reported. FAR_DYNAMIC_SHARED is both.
#pragma once

#include <cmath>

#include "testing/cuda_fibers.h"

#ifdef __SANITIZE_ADDRESS__
#define __shared__ static
#else
#define __shared__ static thread_local
#endif
#define FAR_DYNAMIC_SHARED(type, name) type* name = static_cast<type*>(far::emulator::here().shared())
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

// Vectors, aligned as CUDA aligns them: UndefinedBehaviorSanitizer then sees a misaligned access.

#define FAR_VECTORS(name, type, align2, align4)                                 \
  struct alignas(align2) name##2 {                                              \
    type x, y;                                                                  \
  };                                                                            \
  struct alignas(align4) name##4 {                                              \
    type x, y, z, w;                                                            \
  };                                                                            \
  inline name##2 make_##name##2(type x, type y) { return {x, y}; }              \
  inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }

FAR_VECTORS(char, signed char, 2, 4)
FAR_VECTORS(uchar, unsigned char, 2, 4)
FAR_VECTORS(short, short, 4, 8)
FAR_VECTORS(ushort, unsigned short, 4, 8)
FAR_VECTORS(int, int, 8, 16)
FAR_VECTORS(uint, unsigned, 8, 16)
FAR_VECTORS(float, float, 8, 16)
FAR_VECTORS(double, double, 16, 16)
#undef FAR_VECTORS

// Barriers of the block.

#define FAR_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

namespace far {
namespace emulator {

inline size_t barrier(const char* what, bool predicate, const char* file, int line, size_t* arrived = nullptr) {
  const auto& given = here().meet_block({what, file, line, false, 0}, predicate);
  if (arrived) *arrived = given.size();
  return std::count(given.begin(), given.end(), 1u);
}

// A collective of the lanes in `mask`; each gives some bits.
template <class T>
const Fiber& gather(const char* what, unsigned mask, T value, const char* file, int line) {
  static_assert(sizeof(T) <= 8, "a shuffle moves at most 8 bytes");
  uint64_t bits = 0;
  memcpy(&bits, &value, sizeof value);
  return here().meet_warp({what, file, line, true, mask}, bits);
}

template <class T>
T read(const Fiber& self, unsigned lane, const char* what, int line) {
  FAR_REQUIRE(self.came >> lane & 1, here().describe(), ": ", what, " in line ", line, " reads lane ", lane,
              ", which takes no part");
  T value;
  memcpy(&value, &self.received[lane], sizeof value);
  return value;
}

inline unsigned ballot(const char* what, unsigned mask, bool predicate, const char* file, int line) {
  const Fiber& self = gather(what, mask, predicate, file, line);
  unsigned bits = 0;  // lanes that did not come have given nothing
  for (unsigned lane = 0; lane < unsigned(warpSize); ++lane) bits |= unsigned(self.received[lane]) << lane;
  return bits;
}

// Other threads may come first, in any order.
template <class T, class Change>
T atomic(T* address, Change change) {
  here().pause();
  const T old = *address;
  *address = change(old);
  return old;
}

template <class T>
using Same = std::common_type_t<T>;  // an argument that T is not deduced from

}  // namespace emulator
}  // namespace far

inline void __syncthreads(FAR_HERE) { far::emulator::barrier("__syncthreads", false, file, line); }
inline int __syncthreads_count(int predicate, FAR_HERE) {
  return int(far::emulator::barrier("__syncthreads_count", predicate, file, line));
}
inline int __syncthreads_or(int predicate, FAR_HERE) {
  return far::emulator::barrier("__syncthreads_or", predicate, file, line) != 0;
}
inline int __syncthreads_and(int predicate, FAR_HERE) {
  size_t arrived;
  const size_t count = far::emulator::barrier("__syncthreads_and", predicate, file, line, &arrived);
  return count == arrived;
}

// Collectives of a warp.

inline void __syncwarp(unsigned mask = ~0u, FAR_HERE) { far::emulator::gather("__syncwarp", mask, 0, file, line); }
inline unsigned __ballot_sync(unsigned mask, int predicate, FAR_HERE) {
  return far::emulator::ballot("__ballot_sync", mask, predicate, file, line);
}
inline int __any_sync(unsigned mask, int predicate, FAR_HERE) {
  return far::emulator::ballot("__any_sync", mask, predicate, file, line) != 0;
}
inline int __all_sync(unsigned mask, int predicate, FAR_HERE) {
  return far::emulator::ballot("__all_sync", mask, !predicate, file, line) == 0;
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize, FAR_HERE) {
  const auto& self = far::emulator::gather("__shfl_sync", mask, value, file, line);
  const unsigned lane = far::emulator::here().lane();
  return far::emulator::read<T>(self, (lane & ~unsigned(width - 1)) | (source & (width - 1)), "__shfl_sync", line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize, FAR_HERE) {
  const auto& self = far::emulator::gather("__shfl_up_sync", mask, value, file, line);
  const unsigned lane = far::emulator::here().lane(), place = lane & (width - 1);
  return place < delta ? value : far::emulator::read<T>(self, lane - delta, "__shfl_up_sync", line);
}
template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize, FAR_HERE) {
  const auto& self = far::emulator::gather("__shfl_down_sync", mask, value, file, line);
  const unsigned lane = far::emulator::here().lane(), place = lane & (width - 1);
  return place + delta >= unsigned(width) ? value
                                          : far::emulator::read<T>(self, lane + delta, "__shfl_down_sync", line);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int flip, int width = warpSize, FAR_HERE) {
  const auto& self = far::emulator::gather("__shfl_xor_sync", mask, value, file, line);
  const unsigned lane = far::emulator::here().lane(), other = lane ^ unsigned(flip);
  return other > (lane | unsigned(width - 1)) ? value
                                              : far::emulator::read<T>(self, other, "__shfl_xor_sync", line);
}

// Atomics. On floating point numbers CUDA has only the sum and the exchange.

template <class T>
T atomicAdd(T* address, far::emulator::Same<T> value) {
  return far::emulator::atomic(address, [=](T old) { return T(old + value); });
}
template <class T>
T atomicExch(T* address, far::emulator::Same<T> value) {
  return far::emulator::atomic(address, [=](T) { return value; });
}
template <class T, class = std::enable_if_t<std::is_integral_v<T>>>
T atomicMax(T* address, far::emulator::Same<T> value) {
  return far::emulator::atomic(address, [=](T old) { return std::max(old, value); });
}
template <class T, class = std::enable_if_t<std::is_integral_v<T>>>
T atomicMin(T* address, far::emulator::Same<T> value) {
  return far::emulator::atomic(address, [=](T old) { return std::min(old, value); });
}
template <class T, class = std::enable_if_t<std::is_integral_v<T>>>
T atomicOr(T* address, far::emulator::Same<T> value) {
  return far::emulator::atomic(address, [=](T old) { return T(old | value); });
}
template <class T, class = std::enable_if_t<std::is_integral_v<T>>>
T atomicCAS(T* address, far::emulator::Same<T> compare, far::emulator::Same<T> value) {
  return far::emulator::atomic(address, [=](T old) { return old == compare ? value : old; });
}
inline void __threadfence() {}
inline void __threadfence_block() {}

// Functions of device code that the C++ library does not have. rsqrtf is left out: its last bits are the GPU's own.

using std::max;
using std::min;

template <class T>
T __ldg(const T* address) {
  return *address;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clz(int x) { return x ? __builtin_clz(unsigned(x)) : 32; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline float __fadd_rn(float x, float y) { return x + y; }
inline float __fmul_rn(float x, float y) { return x * y; }
inline float __fdiv_rn(float x, float y) { return x / y; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }

namespace far {
namespace emulator {
template <class To, class From>
To same_bits(From from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  memcpy(&to, &from, sizeof to);
  return to;
}
}  // namespace emulator
}  // namespace far

inline int __float_as_int(float x) { return far::emulator::same_bits<int>(x); }
inline unsigned __float_as_uint(float x) { return far::emulator::same_bits<unsigned>(x); }
inline float __int_as_float(int x) { return far::emulator::same_bits<float>(x); }
inline float __uint_as_float(unsigned x) { return far::emulator::same_bits<float>(x); }

// The runtime: device memory is host memory, and what is queued is done at once.

using cudaStream_t = void*;
enum cudaError_t { cudaSuccess, cudaErrorInvalidValue };
enum cudaMemcpyKind { cudaMemcpyHostToDevice = 1, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice, cudaMemcpyDefault };
inline const char* cudaGetErrorString(cudaError_t error) { return error == cudaSuccess ? "no error" : "invalid value"; }
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t = nullptr) {
  memmove(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t = nullptr) {
  memset(to, value, bytes);
  return cudaSuccess;
}
#undef FAR_HERE
