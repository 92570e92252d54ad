#include "kernels/adam.h"

#include <algorithm>

#include "common/parallel.h"
#include "cpu/convert.h"

namespace far {
namespace FAR_ISA {

namespace {

constexpr int64_t block = 1024;       // elements converted at a time: a few arrays of them fit the first-level cache
constexpr int64_t line = 16;          // floats of a cache line
// Elements fetched ahead: the hardware's own prefetching stops at every 4 KiB page, a thousand elements of each of four
// streams. One thread then takes 14 % less time (Xeon at 2.8 GHz, AVX-512; 256 to 1024 are alike).
constexpr int64_t ahead = 512;
constexpr int64_t chunk = 1 << 16;    // elements of a task; a bucket of 25 MB gives 100

// Moments as bfloat16: rounded at random, or tiny changes of a large average would all be lost.
void store_moments(const float* exp_avg, const float* exp_avg_sq, const AdamBucket& b, const AdamCoefficients& c,
                   int64_t at, int64_t within, int64_t n) {
  uint16_t* __restrict__ m = static_cast<uint16_t*>(b.exp_avg) + at;
  uint16_t* __restrict__ v = static_cast<uint16_t*>(b.exp_avg_sq) + at;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t noise = adam_noise(c, within + i);
    m[i] = float_to_bf16_stochastic(exp_avg[i], noise & 0xffffu);
    v[i] = float_to_bf16_stochastic(exp_avg_sq[i], noise >> 16);
  }
}

void update_floats(float* __restrict__ weight, const float* __restrict__ grad, float* __restrict__ exp_avg,
                   float* __restrict__ exp_avg_sq, float* __restrict__ max_exp_avg_sq,
                   const float* __restrict__ frozen_sq, const AdamCoefficients& now, int64_t n) {
  const AdamCoefficients c = now;
  if (max_exp_avg_sq)
    for (int64_t i = 0; i < n; ++i)
      adam_update(weight[i], grad[i], exp_avg[i], exp_avg_sq[i], max_exp_avg_sq + i, nullptr, c);
  else if (frozen_sq)
    for (int64_t i = 0; i < n; ++i)
      adam_update(weight[i], grad[i], exp_avg[i], exp_avg_sq[i], nullptr, frozen_sq + i, c);
  else {
    const int64_t whole = n / line * line;
    for (int64_t i = 0; i < whole; i += line) {
      __builtin_prefetch(weight + i + ahead, 1);
      __builtin_prefetch(grad + i + ahead, 0);
      __builtin_prefetch(exp_avg + i + ahead, 1);
      __builtin_prefetch(exp_avg_sq + i + ahead, 1);
      for (int64_t k = i; k < i + line; ++k)
        adam_update(weight[k], grad[k], exp_avg[k], exp_avg_sq[k], nullptr, nullptr, c);
    }
    for (int64_t i = whole; i < n; ++i) adam_update(weight[i], grad[i], exp_avg[i], exp_avg_sq[i], nullptr, nullptr, c);
  }
}

void follow_param(const AdamBucket& b, int64_t at, int64_t n) {
  float* __restrict__ weight = b.weight + at;
  const uint16_t* __restrict__ param = static_cast<const uint16_t*>(b.param) + at;
  if (b.grad_type == Dtype::bf16)
    for (int64_t i = 0; i < n; ++i) weight[i] = adam_follow(weight[i], param[i], Dtype::bf16);
  else
    for (int64_t i = 0; i < n; ++i) weight[i] = adam_follow(weight[i], param[i], Dtype::f16);
}

void update_range(const AdamBucket& b, const AdamSegment& s, int64_t begin, int64_t end) {
  const bool floats = b.grad_type == Dtype::f32 && b.moment_type == Dtype::f32;
  const float* frozen_sq = s.frozen_mass > 0 ? b.frozen_sq : nullptr;
  if (floats && !b.out) {
    update_floats(b.weight + begin, static_cast<const float*>(b.grad) + begin, static_cast<float*>(b.exp_avg) + begin,
                  static_cast<float*>(b.exp_avg_sq) + begin, b.max_exp_avg_sq ? b.max_exp_avg_sq + begin : nullptr,
                  frozen_sq ? frozen_sq + begin : nullptr, s.now, end - begin);
    return;
  }
  float grad[block], exp_avg[block], exp_avg_sq[block];
  for (int64_t at = begin; at < end; at += block) {
    const int64_t n = std::min(block, end - at);
    if (b.param) follow_param(b, at, n);
    const float* g = load_floats(b.grad, b.grad_type, at, n, grad);
    float* m = load_floats(b.exp_avg, b.moment_type, at, n, exp_avg);
    float* v = load_floats(b.exp_avg_sq, b.moment_type, at, n, exp_avg_sq);
    update_floats(b.weight + at, g, m, v, b.max_exp_avg_sq ? b.max_exp_avg_sq + at : nullptr,
                  frozen_sq ? frozen_sq + at : nullptr, s.now, n);
    if (b.moment_type != Dtype::f32) store_moments(m, v, b, s.now, at, at - s.begin, n);
    if (b.param) store_floats(b.weight + at, b.param, b.grad_type, at, n);
    if (b.out) store_floats(b.weight + at, b.out, b.out_type, at, n);
  }
}

void update_chunk(const AdamBucket& b, int64_t begin, int64_t end) {
  const AdamSegment* last = b.segments + b.count;
  const AdamSegment* s =
      std::partition_point(b.segments, last, [&](const AdamSegment& segment) { return segment.end <= begin; });
  for (; s != last && s->begin < end; ++s) {
    const int64_t from = std::max(begin, s->begin), to = std::min(end, s->end);
    if (s->now.active) {
      update_range(b, *s, from, to);
    } else if (b.out) {
      if (b.param) follow_param(b, from, to - from);
      store_floats(b.weight + from, b.out, b.out_type, from, to - from);
    }
  }
}

// Adds the squares of n numbers from each of `streams` places to its own sums: a fixed order for every instruction set.
template <int streams>
void add_squares(const float* const* x, int64_t n, double (*sums)[line]) {
  const int64_t whole = n / line * line;
  for (int64_t i = 0; i < whole; i += line)
    for (int s = 0; s < streams; ++s)
      for (int k = 0; k < line; ++k) sums[s][k] += double(x[s][i + k]) * double(x[s][i + k]);
  for (int64_t i = whole; i < n; ++i)
    for (int s = 0; s < streams; ++s) sums[s][i - whole] += double(x[s][i]) * double(x[s][i]);
}

double chunk_squares(const void* values, Dtype type, int64_t begin, int64_t end) {
  constexpr int quarters = 4;  // read side by side: one stream alone waits for memory, 12 against 8 ms for ResNet-50
  constexpr int64_t quarter = squares_chunk / quarters;
  double sums[quarters][line] = {};
  float buffers[quarters][block];
  const float* x[quarters];
  if (end - begin == squares_chunk) {
    for (int64_t at = begin; at < begin + quarter; at += block) {
      for (int q = 0; q < quarters; ++q) x[q] = load_floats(values, type, at + q * quarter, block, buffers[q]);
      add_squares<quarters>(x, block, sums);
    }
  } else {
    for (int64_t at = begin; at < end; at += block) {
      const int64_t n = std::min(block, end - at);
      x[0] = load_floats(values, type, at, n, buffers[0]);
      add_squares<1>(x, n, sums);
    }
  }
  double* flat = sums[0];
  for (int width = quarters * line / 2; width; width /= 2)
    for (int k = 0; k < width; ++k) flat[k] += flat[k + width];
  return flat[0];
}

}  // namespace

void adam_update(const AdamBucket* buckets, int64_t count, int threads) {
  int64_t tasks = 0;
  for (int64_t b = 0; b < count; ++b) tasks += (buckets[b].numel + chunk - 1) / chunk;
  parallel_for(tasks, threads, [&](int64_t task) {
    const AdamBucket* b = buckets;
    for (int64_t chunks; task >= (chunks = (b->numel + chunk - 1) / chunk); ++b) task -= chunks;
    update_chunk(*b, task * chunk, std::min((task + 1) * chunk, b->numel));
  });
}

void sum_squares(const void* values, Dtype type, int64_t numel, double* partials, int threads) {
  const int64_t chunks = (numel + squares_chunk - 1) / squares_chunk;
  parallel_for((chunks + 3) / 4, threads, [&](int64_t task) {
    for (int64_t c = 4 * task; c < std::min(4 * task + 4, chunks); ++c)
      partials[c] = chunk_squares(values, type, c * squares_chunk, std::min((c + 1) * squares_chunk, numel));
  });
}

}  // namespace FAR_ISA
}  // namespace far
