#include "kernels/adam.h"

#include <algorithm>

#include "common/parallel.h"

namespace far {
namespace FAR_ISA {

namespace {

void update_range(const AdamArgs& a, const AdamSegment& segment, int64_t begin, int64_t end) {
  const AdamSegment s = segment;
  float* __restrict__ param = a.param;
  const float* __restrict__ grad = a.grad;
  float* __restrict__ exp_avg = a.exp_avg;
  float* __restrict__ exp_avg_sq = a.exp_avg_sq;
  for (int64_t i = begin; i < end; ++i) adam_update(param[i], grad[i], exp_avg[i], exp_avg_sq[i], s);
}

}  // namespace

void adam_step(const AdamArgs& a, const AdamSegment* segments, int64_t count, int threads) {
  constexpr int64_t chunk = 1 << 16;  // elements; a bucket of 25 MB gives 100 tasks
  const int64_t tasks = (a.numel + chunk - 1) / chunk;
  parallel_for(tasks, threads, [&](int64_t task) {
    const int64_t begin = task * chunk, end = std::min(begin + chunk, a.numel);
    const AdamSegment* s = std::partition_point(
        segments, segments + count, [&](const AdamSegment& segment) { return segment.end <= begin; });
    for (; s != segments + count && s->begin < end; ++s)
      update_range(a, *s, std::max(begin, s->begin), std::min(end, s->end));
  });
}

}  // namespace FAR_ISA
}  // namespace far
