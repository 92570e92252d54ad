#include "cuda/launch.cuh"
#include "kernels/adam.h"

namespace far {
namespace cuda {

namespace {

constexpr int threads = 256;

// Four elements at a time, 16 bytes of float32 or 8 of a smaller type.
__device__ inline float4 load4(const void* array, Dtype type, int64_t i) {
  if (type == Dtype::f32) return reinterpret_cast<const float4*>(array)[i];
  const ushort4 x = reinterpret_cast<const ushort4*>(array)[i];
  if (type == Dtype::bf16)
    return make_float4(bf16_to_float(x.x), bf16_to_float(x.y), bf16_to_float(x.z), bf16_to_float(x.w));
  return make_float4(f16_to_float(x.x), f16_to_float(x.y), f16_to_float(x.z), f16_to_float(x.w));
}

__device__ inline void store4(void* array, Dtype type, int64_t i, const float4& x) {
  if (type == Dtype::f32)
    reinterpret_cast<float4*>(array)[i] = x;
  else if (type == Dtype::bf16)
    reinterpret_cast<ushort4*>(array)[i] =
        make_ushort4(float_to_bf16(x.x), float_to_bf16(x.y), float_to_bf16(x.z), float_to_bf16(x.w));
  else
    reinterpret_cast<ushort4*>(array)[i] =
        make_ushort4(float_to_f16(x.x), float_to_f16(x.y), float_to_f16(x.z), float_to_f16(x.w));
}

// The moments of four elements, the first of which is element `within` of its parameter.
__device__ inline void store_moments(const AdamBucket& b, int64_t i, const float4& m, const float4& v,
                                     const AdamCoefficients& c, int64_t within) {
  if (b.moment_type == Dtype::f32) {
    store4(b.exp_avg, Dtype::f32, i, m);
    store4(b.exp_avg_sq, Dtype::f32, i, v);
    return;
  }
  const uint32_t r0 = adam_noise(c, within), r1 = adam_noise(c, within + 1), r2 = adam_noise(c, within + 2),
                 r3 = adam_noise(c, within + 3);
  reinterpret_cast<ushort4*>(b.exp_avg)[i] = make_ushort4(
      float_to_bf16_stochastic(m.x, r0 & 0xffffu), float_to_bf16_stochastic(m.y, r1 & 0xffffu),
      float_to_bf16_stochastic(m.z, r2 & 0xffffu), float_to_bf16_stochastic(m.w, r3 & 0xffffu));
  reinterpret_cast<ushort4*>(b.exp_avg_sq)[i] =
      make_ushort4(float_to_bf16_stochastic(v.x, r0 >> 16), float_to_bf16_stochastic(v.y, r1 >> 16),
                   float_to_bf16_stochastic(v.z, r2 >> 16), float_to_bf16_stochastic(v.w, r3 >> 16));
}

// One block per chunk of the bucket; `first` says with which segment a chunk begins, so that no thread searches.
// Arrays are padded to whole vectors and segments begin at multiples of four elements, so a vector never crosses from
// one segment into the next; the last vector of a segment also updates its padding, whose gradient and state are
// zero and stay so: it divides zero by eps, or with eps = 0 by zero, and hence must not be stored. It is masked.
// `plain`: float32 throughout, no amsgrad, nothing frozen, no second output: the common case, with 128-bit accesses alone.
template <bool plain>
__global__ void __launch_bounds__(threads) adam_kernel(AdamBucket b) {
  const int64_t chunk_begin = int64_t(blockIdx.x) * adam_chunk;
  const int64_t chunk_end = chunk_begin + adam_chunk < b.numel ? chunk_begin + adam_chunk : b.numel;
  for (int64_t k = b.first[blockIdx.x]; k < b.count; ++k) {
    const AdamSegment& s = b.segments[k];
    if (s.begin >= chunk_end) break;
    const AdamCoefficients c = s.now;
    const int64_t begin = s.begin > chunk_begin ? s.begin : chunk_begin;
    const int64_t end = s.end < chunk_end ? s.end : chunk_end;
    if (!c.active && (plain || !b.out)) continue;
    for (int64_t at = begin + 4 * threadIdx.x; at < end; at += 4 * threads) {
      const int64_t i = at / 4;
      float4 w = load4(b.weight, Dtype::f32, i);
      if (!plain && b.param) {
        const ushort4 p = reinterpret_cast<const ushort4*>(b.param)[i];
        w = make_float4(adam_follow(w.x, p.x, b.grad_type), adam_follow(w.y, p.y, b.grad_type),
                        adam_follow(w.z, p.z, b.grad_type), adam_follow(w.w, p.w, b.grad_type));
        if (!c.active) store4(b.weight, Dtype::f32, i, w);
      }
      if (c.active) {
        const float4 g = load4(b.grad, plain ? Dtype::f32 : b.grad_type, i);
        float4 m = load4(b.exp_avg, plain ? Dtype::f32 : b.moment_type, i);
        float4 v = load4(b.exp_avg_sq, plain ? Dtype::f32 : b.moment_type, i);
        const bool amsgrad = !plain && b.max_exp_avg_sq;
        float4 x = amsgrad ? load4(b.max_exp_avg_sq, Dtype::f32, i) : make_float4(0.f, 0.f, 0.f, 0.f);
        const bool frozen = !plain && b.frozen_sq && s.frozen_mass > 0;
        const float4 f = frozen ? load4(b.frozen_sq, Dtype::f32, i) : make_float4(0.f, 0.f, 0.f, 0.f);
        const int64_t rest = end - at;
        adam_update(w.x, g.x, m.x, v.x, amsgrad ? &x.x : nullptr, frozen ? &f.x : nullptr, c);
        if (rest > 1) adam_update(w.y, g.y, m.y, v.y, amsgrad ? &x.y : nullptr, frozen ? &f.y : nullptr, c);
        if (rest > 2) adam_update(w.z, g.z, m.z, v.z, amsgrad ? &x.z : nullptr, frozen ? &f.z : nullptr, c);
        if (rest > 3) adam_update(w.w, g.w, m.w, v.w, amsgrad ? &x.w : nullptr, frozen ? &f.w : nullptr, c);
        store4(b.weight, Dtype::f32, i, w);
        if (plain) {
          store4(b.exp_avg, Dtype::f32, i, m);
          store4(b.exp_avg_sq, Dtype::f32, i, v);
        } else {
          store_moments(b, i, m, v, c, at - s.begin);
          if (amsgrad) store4(b.max_exp_avg_sq, Dtype::f32, i, x);
          if (b.param) store4(b.param, b.grad_type, i, w);
        }
      }
      if (!plain && b.out) store4(b.out, b.out_type, i, w);
    }
  }
}

__global__ void advance_kernel(AdamSegment* segments, int64_t count, const AdamGroup* groups, AdamScale scale) {
  const int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < count) far::adam_advance(segments[i], groups[segments[i].group], scale);
}

// Each block sums one chunk: every thread its vectors, then a tree over the threads. No atomics: the order is fixed.
__global__ void __launch_bounds__(threads) squares_kernel(const void* values, Dtype type, int64_t numel,
                                                          double* partials) {
  __shared__ double sums[threads];
  const int64_t begin = int64_t(blockIdx.x) * squares_chunk;
  const int64_t end = begin + squares_chunk < numel ? begin + squares_chunk : numel;
  double sum = 0;
  for (int64_t at = begin + 4 * threadIdx.x; at < end; at += 4 * threads) {
    const float4 x = load4(values, type, at / 4);
    sum += double(x.x) * x.x;
    if (end - at > 1) sum += double(x.y) * x.y;
    if (end - at > 2) sum += double(x.z) * x.z;
    if (end - at > 3) sum += double(x.w) * x.w;
  }
  sums[threadIdx.x] = sum;
  for (int width = threads / 2; width > 0; width /= 2) {
    __syncthreads();
    if (int(threadIdx.x) < width) sums[threadIdx.x] += sums[threadIdx.x + width];
  }
  if (threadIdx.x == 0) partials[blockIdx.x] = sums[0];
}

dim3 blocks_for(int64_t items, int64_t each) { return dim3(unsigned((items + each - 1) / each)); }

}  // namespace

void adam_advance(AdamSegment* segments, int64_t count, const AdamGroup* groups, const AdamScale& scale,
                  void* cuda_stream) {
  if (count == 0) return;
  constexpr int block = 64;
  launch(advance_kernel, blocks_for(count, block), dim3(block), cuda_stream, segments, count, groups, scale);
}

void adam_update(const AdamBucket& bucket, void* cuda_stream) {
  if (bucket.numel == 0 || bucket.count == 0) return;
  const bool plain = bucket.grad_type == Dtype::f32 && bucket.moment_type == Dtype::f32 && !bucket.max_exp_avg_sq &&
                     !bucket.frozen_sq && !bucket.param && !bucket.out;
  launch(plain ? adam_kernel<true> : adam_kernel<false>, blocks_for(bucket.numel, adam_chunk), dim3(threads),
         cuda_stream, bucket);
}

void sum_squares(const void* values, Dtype type, int64_t numel, double* partials, void* cuda_stream) {
  if (numel == 0) return;
  launch(squares_kernel, blocks_for(numel, squares_chunk), dim3(threads), cuda_stream, values, type, numel, partials);
}

}  // namespace cuda
}  // namespace far
