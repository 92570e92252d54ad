// Every compiled operation on one page: its arguments, its CPU entry, its CUDA entry.
#pragma once

#include <cstdint>

namespace far {

// One Adam step over one flat bucket. Segments are the parameters inside it, one row each.
struct AdamSegment {
  int64_t begin, end;  // elements of the bucket
  float alpha;         // lr / first-moment mass
  float inv_sqrt_mass; // 1 / sqrt(second-moment mass)
  float beta1, beta2, one_minus_beta1, one_minus_beta2;
  float eps;
  float l2;            // added to the gradient times the parameter (Adam)
  float decay;         // lr * weight_decay (AdamW), subtracted times the parameter
};

struct AdamArgs {
  float* param;
  const float* grad;
  float* exp_avg;
  float* exp_avg_sq;
  int64_t numel;
};

// TV-L1 optical flow of a batch of image pairs, contiguous; `bytes`: the images are uint8, else float32 in 0..255.
struct Tvl1Args {
  const void* prev;  // [pairs, height, width]
  const void* next;
  float* flow;       // [pairs, 2, height, width], pixels, x then y
  bool bytes;
  int64_t pairs, height, width;
  float tau, lam, theta;
  int scales;
  double scale_step;
  int warps, iterations;
  int median;        // side of the filter before each warp: 3 or 5, or below for none
};

namespace cpu {
enum class Isa { base, avx2, avx512 };
Isa isa();               // the best that was compiled in and that this CPU runs; FASTACTREC_ISA lowers it
const char* isa_name();
void adam_step(const AdamArgs& args, const AdamSegment* segments, int64_t count, int threads);
void tvl1(const Tvl1Args& args, int threads);
}  // namespace cpu

#ifdef FAR_WITH_CUDA
namespace cuda {
// `segments` lies in device memory, sorted by begin.
void adam_step(const AdamArgs& args, const AdamSegment* segments, int64_t count, void* cuda_stream);
}  // namespace cuda
#endif

}  // namespace far
