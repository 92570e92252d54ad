#include "cuda/launch.cuh"
#include "kernels/adam.h"

namespace far {
namespace cuda {

// Each thread walks the bucket in grid strides, four elements at a time. Buckets are 128-byte aligned and padded to
// whole vectors; segments begin at multiples of 32 elements (FlatBuckets' alignment), so that a vector never crosses
// from one segment into the next. Elements of no segment (padding, untouched parameters) are left alone.
__global__ void adam_kernel(AdamArgs a, const AdamSegment* segments, int64_t count) {
  const int64_t vectors = (a.numel + 3) / 4;
  const int64_t stride = int64_t(gridDim.x) * blockDim.x;
  for (int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x; i < vectors; i += stride) {
    const int64_t first = 4 * i;
    int64_t low = 0, high = count;  // the first segment that ends behind `first`
    while (low < high) {
      const int64_t middle = (low + high) / 2;
      if (segments[middle].end <= first) low = middle + 1;
      else high = middle;
    }
    if (low == count || segments[low].begin > first) continue;
    const AdamSegment s = segments[low];
    if (first + 4 <= s.end) {
      float4 p = reinterpret_cast<float4*>(a.param)[i];
      const float4 g = reinterpret_cast<const float4*>(a.grad)[i];
      float4 m = reinterpret_cast<float4*>(a.exp_avg)[i];
      float4 v = reinterpret_cast<float4*>(a.exp_avg_sq)[i];
      adam_update(p.x, g.x, m.x, v.x, s);
      adam_update(p.y, g.y, m.y, v.y, s);
      adam_update(p.z, g.z, m.z, v.z, s);
      adam_update(p.w, g.w, m.w, v.w, s);
      reinterpret_cast<float4*>(a.param)[i] = p;
      reinterpret_cast<float4*>(a.exp_avg)[i] = m;
      reinterpret_cast<float4*>(a.exp_avg_sq)[i] = v;
    } else {
      for (int64_t j = first; j < s.end; ++j)
        adam_update(a.param[j], a.grad[j], a.exp_avg[j], a.exp_avg_sq[j], s);
    }
  }
}

void adam_step(const AdamArgs& args, const AdamSegment* segments, int64_t count, void* cuda_stream) {
  if (args.numel == 0 || count == 0) return;
  constexpr int block = 256;
  const int64_t blocks = ((args.numel + 3) / 4 + block - 1) / block;
  launch(adam_kernel, dim3(unsigned(blocks < 4096 ? blocks : 4096)), dim3(block), cuda_stream, args, segments, count);
}

}  // namespace cuda
}  // namespace far
