// Small kernels on which the emulator itself is tested, see test_cuda_emulator.py.
#include "emulated/shim.h"

using far::cuda::launch;
using far::cuda::SharedBytes;

namespace {

constexpr int threads = 256;

// One sum per block, by a tree in shared memory.
__global__ void __launch_bounds__(threads) block_sum_kernel(const float* values, int64_t count, float* sums) {
  __shared__ float partial[threads];
  const int t = int(threadIdx.x);
  const int64_t i = int64_t(blockIdx.x) * threads + t;
  partial[t] = i < count ? values[i] : 0.f;
  for (int width = threads / 2; width > 0; width /= 2) {
    __syncthreads();
    if (t < width) partial[t] += partial[t + width];
  }
  if (t == 0) sums[blockIdx.x] = partial[0];
}

// One sum per block: shuffles inside each warp, then the first warp over the warps. A template, as real kernels are.
template <class T>
__global__ void warp_sum_kernel(const T* values, int64_t count, T* sums) {
  __shared__ T partial[threads / 32];
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int warp = int(threadIdx.x) / 32, lane = int(threadIdx.x) % 32;
  T sum = i < count ? values[i] : T(0);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_down_sync(~0u, sum, step);
  if (lane == 0) partial[warp] = sum;
  __syncthreads();
  if (warp != 0) return;
  sum = lane < threads / 32 ? partial[lane] : T(0);
  for (int step = 16; step > 0; step /= 2) sum += __shfl_xor_sync(~0u, sum, step);
  if (lane == 0) sums[blockIdx.x] = sum;
}

// How many values are positive, as bits per warp, per block and in total.
__global__ void count_kernel(const int* values, int64_t count, int* ballots, int* total, int* any, int* everyone) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  const int positive = i < count && values[i] > 0;
  const unsigned ballot = __ballot_sync(~0u, positive);
  if (threadIdx.x % 32 == 0) ballots[i / 32] = int(ballot);
  const int here = __syncthreads_count(positive);
  const int some = __syncthreads_or(positive), all = __syncthreads_and(positive);
  if (threadIdx.x == 0) {
    atomicAdd(total, here);
    any[blockIdx.x] = some;
    everyone[blockIdx.x] = all;
  }
}

__global__ void histogram_kernel(const int* values, int64_t count, int bins, int* histogram, int* largest) {
  FAR_DYNAMIC_SHARED(int, own);
  for (int b = int(threadIdx.x); b < bins; b += int(blockDim.x)) own[b] = 0;
  __syncthreads();
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) {
    atomicAdd(&own[values[i]], 1);
    atomicMax(largest, values[i]);
  }
  __syncthreads();
  for (int b = int(threadIdx.x); b < bins; b += int(blockDim.x)) atomicAdd(&histogram[b], own[b]);
}

// Threads without work return before the barrier, which the others still pass.
__global__ void reverse_kernel(const int* values, int64_t count, int* out) {
  __shared__ int tile[threads];
  const int64_t begin = int64_t(blockIdx.x) * threads;
  const int here = int(count - begin < threads ? count - begin : threads), t = int(threadIdx.x);
  if (t >= here) return;
  tile[t] = values[begin + t];
  __syncthreads();
  out[begin + t] = tile[here - 1 - t];
}

// Every thread gets the value of the thread `steps` places further on, one place at a time. The second barrier keeps
// the fast from overwriting what the slow have not read.
__global__ void rotate_kernel(int* values, int steps) {
  __shared__ int ring[threads];
  const int t = int(threadIdx.x);
  int own = values[blockIdx.x * threads + t];
  for (int step = 0; step < steps; ++step) {
    ring[t] = own;
    __syncthreads();
    own = ring[(t + 1) % threads];
    __syncthreads();
  }
  values[blockIdx.x * threads + t] = own;
}

// A tile per block, through shared memory so that both sides are read and written along rows.
__global__ void transpose_kernel(const float* in, int64_t rows, int64_t columns, float* out) {
  __shared__ float tile[16][17];
  const int x = int(threadIdx.x), y = int(threadIdx.y);
  int64_t row = int64_t(blockIdx.y) * 16 + y, column = int64_t(blockIdx.x) * 16 + x;
  if (row < rows && column < columns) tile[y][x] = in[row * columns + column];
  __syncthreads();
  row = int64_t(blockIdx.x) * 16 + y;
  column = int64_t(blockIdx.y) * 16 + x;
  if (row < columns && column < rows) out[row * rows + column] = tile[x][y];
}

// What the launch, the scheduler or a sanitizer must refuse.
__global__ void divergent_kernel(int* out) {
  if (threadIdx.x < 32) __syncthreads();
  else __syncthreads();
  out[threadIdx.x] = 1;
}

__global__ void half_warp_kernel(int* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(~0u, int(threadIdx.x), 0);
  else __syncthreads();
}

__global__ void outside_mask_kernel(int* out) { out[threadIdx.x] = int(__ballot_sync(0xffffu, 1)); }

__global__ void absent_lane_kernel(int* out) {
  if (threadIdx.x < 16) out[threadIdx.x] = __shfl_sync(0xffffu, int(threadIdx.x), 20);
}

__global__ void uninitialised_kernel(float* out) {
  __shared__ float tile[threads];
  if (blockIdx.x == 0) tile[threadIdx.x] = 1.f;
  out[blockIdx.x * blockDim.x + threadIdx.x] = tile[threadIdx.x];
}

__global__ void pointer_overrun_kernel(float* out) {
  __shared__ float tile[threads];
  tile[threadIdx.x] = 0.f;
  float* past = tile + threadIdx.x + 1;
  *past = 1.f;
  out[threadIdx.x] = *past;
}

__global__ void order_kernel(int* ticket, int* order) {
  order[blockIdx.x * blockDim.x + threadIdx.x] = atomicAdd(ticket, 1);
}

__global__ void misaligned_kernel(float4* out) { *out = make_float4(1, 2, 3, 4); }

dim3 blocks_for(int64_t count) { return dim3(unsigned((count + threads - 1) / threads)); }

}  // namespace

extern "C" {

const char* block_sum(int64_t seed, const float* values, int64_t count, float* sums) {
  return guarded(seed, [=] { launch(block_sum_kernel, blocks_for(count), threads, nullptr, values, count, sums); });
}

const char* warp_sum(int64_t seed, const double* values, int64_t count, double* sums) {
  return guarded(seed,
                 [=] { launch(warp_sum_kernel<double>, blocks_for(count), threads, nullptr, values, count, sums); });
}

const char* count_positive(int64_t seed, const int* values, int64_t count, int* ballots, int* total, int* any,
                           int* everyone) {
  return guarded(seed, [=] {
    launch(count_kernel, blocks_for(count), threads, nullptr, values, count, ballots, total, any, everyone);
  });
}

const char* histogram(int64_t seed, const int* values, int64_t count, int64_t bins, int* out, int* largest) {
  return guarded(seed, [=] {
    cudaMemsetAsync(out, 0, size_t(bins) * sizeof(int));
    launch(histogram_kernel, blocks_for(count), threads, SharedBytes{size_t(bins) * sizeof(int)}, nullptr, values,
           count, int(bins), out, largest);
  });
}

const char* reverse(int64_t seed, const int* values, int64_t count, int* out) {
  return guarded(seed, [=] { launch(reverse_kernel, blocks_for(count), threads, nullptr, values, count, out); });
}

const char* rotate(int64_t seed, int* values, int64_t blocks, int64_t steps) {
  return guarded(seed, [=] { launch(rotate_kernel, dim3(unsigned(blocks)), threads, nullptr, values, int(steps)); });
}

const char* transpose(int64_t seed, const float* in, int64_t rows, int64_t columns, float* out) {
  return guarded(seed, [=] {
    const dim3 grid(unsigned((columns + 15) / 16), unsigned((rows + 15) / 16));
    launch(transpose_kernel, grid, dim3(16, 16), nullptr, in, rows, columns, out);
  });
}

const char* order(int64_t seed, int64_t blocks, int* ticket, int* out) {
  return guarded(seed, [=] { launch(order_kernel, dim3(unsigned(blocks)), 64, nullptr, ticket, out); });
}

const char* uninitialised(int64_t seed, float* out) {
  return guarded(seed, [=] { launch(uninitialised_kernel, 2, threads, nullptr, out); });
}

const char* pointer_overrun(int64_t seed, float* out) {
  return guarded(seed, [=] { launch(pointer_overrun_kernel, 1, threads, nullptr, out); });
}

const char* misaligned(int64_t seed, float* out) {
  return guarded(seed, [=] { launch(misaligned_kernel, 1, 1, nullptr, reinterpret_cast<float4*>(out + 1)); });
}

const char* refused(int64_t seed, int64_t which, int* out) {
  return guarded(seed, [=] {
    if (which == 0) launch(divergent_kernel, 1, 64, nullptr, out);
    if (which == 1) launch(half_warp_kernel, 1, 64, nullptr, out);
    if (which == 2) launch(outside_mask_kernel, 1, 32, nullptr, out);
    if (which == 3) launch(absent_lane_kernel, 1, 32, nullptr, out);
    if (which == 4) launch(order_kernel, dim3(1, 65536), 1, nullptr, out, out);
    if (which == 5) launch(order_kernel, 1, 1025, nullptr, out, out);
    if (which == 6) launch(order_kernel, 0, 1, nullptr, out, out);
    if (which == 7) launch(order_kernel, 1, 1, SharedBytes{(48 << 10) + 1}, nullptr, out, out);
    if (which == 8) launch(order_kernel, 1, dim3(1, 1, 65), nullptr, out, out);
  });
}

}  // extern "C"
