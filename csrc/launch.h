// Every compiled operation on one page: its arguments, its CPU entry, its CUDA entry.
#pragma once

#include <cstdint>

namespace far {

enum class Dtype : int32_t { f32, bf16, f16 };

// Hyper-parameters of one parameter group.
struct AdamGroup {
  double lr, beta1, beta2, eps, weight_decay;
  int64_t decoupled, maximize;  // AdamW's decay; ascend
};

// What every element of a parameter needs in one step; adam_advance writes it.
struct AdamCoefficients {
  float alpha;          // lr / mass
  float inv_sqrt_mass;  // 1 / sqrt(mass_sq)
  float beta1, beta2, one_minus_beta1, one_minus_beta2;
  float eps;
  float l2;             // times the weight, added to the gradient (Adam)
  float decay;          // lr * weight_decay, times the weight, subtracted (AdamW)
  float grad_factor;    // loss scale, clipping and sign
  uint32_t seed;        // of stochastic rounding
  int32_t active;       // takes part in this step
};

// A parameter inside a bucket, with the state that belongs to it as a whole. Rows lie on the bucket's device, so that a
// CUDA graph can replay steps.
struct AdamSegment {
  int64_t begin, end;    // elements of the bucket
  double mass, mass_sq;  // sums of the weights inside exp_avg and exp_avg_sq: 1 - beta^steps in plain Adam
  double frozen_mass;    // that of frozen_sq; 0 as long as exp_avg_sq itself is used
  float step;            // torch's counter
  int32_t group;         // row of the group table
  int32_t live;          // has a gradient
  uint32_t key;          // number of the parameter
  AdamCoefficients now;
};

// Scalars of one step, on the bucket's device; null where not used.
struct AdamScale {
  const float* grad_scale;  // gradients are this much too large
  const float* found_inf;   // not zero: skip the step
  const double* squares;    // sum of squares of all gradients as they lie there: clip to max_norm
  double max_norm;
};

constexpr int64_t adam_chunk = 4096;  // elements of a bucket that one CUDA block updates

struct AdamBucket {
  float* weight;             // float32 parameter, or float32 master of a smaller one
  const void* grad;
  void* exp_avg;
  void* exp_avg_sq;
  float* max_exp_avg_sq;     // amsgrad, else null
  const float* frozen_sq;    // divides the update in place of exp_avg_sq where a segment says so; or null
  void* param;               // of grad_type, where `weight` is a master; else null
  void* out;                 // second copy of the new weights, or null
  Dtype grad_type, moment_type, out_type;
  int64_t numel;
  const AdamSegment* segments;  // sorted, disjoint; begin is a multiple of 4. Elements of none are left alone.
  int64_t count;
  const int32_t* first;      // CUDA: for each chunk, the first segment that ends behind its begin
};

constexpr int64_t squares_chunk = 1 << 14;  // elements summed into one partial result

constexpr int64_t quantise_block = 256;  // elements that share a scale

// values -> payload; kernels/quantise.h describes both.
struct QuantiseArgs {
  const float* values;
  const float* reference;  // subtracted; null: zero
  float* residual;         // added, then what the payload lacks; null: dropped
  uint8_t* payload;        // aligned to 16 bytes
  float factor;            // payload holds factor * (values - reference) + residual
  int bits;                // 16, 8 or 4
  int64_t numel;
};

// payloads -> sum
struct DequantiseArgs {
  const uint8_t* payloads;  // aligned to 16 bytes
  int64_t rows, stride;     // bytes from one row to the next, a multiple of 16
  const float* base;        // added to the sum of all rows; null: zero
  float* out;               // may be base
  int bits;
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
void adam_advance(AdamSegment* segments, int64_t count, const AdamGroup* groups, const AdamScale& scale);
void adam_update(const AdamBucket* buckets, int64_t count, int threads);  // all buckets in one parallel region
// Partial sums of squares in double, one per squares_chunk elements; the order of additions is fixed.
void sum_squares(const void* values, Dtype type, int64_t numel, double* partials, int threads);
void quantise(const QuantiseArgs& args, int threads);
void dequantise_sum(const DequantiseArgs& args, int threads);
void tvl1(const Tvl1Args& args, int threads);
}  // namespace cpu

#ifdef FAR_WITH_CUDA
namespace cuda {  // pointers into device memory, aligned to 16 bytes where nothing else is said
void adam_advance(AdamSegment* segments, int64_t count, const AdamGroup* groups, const AdamScale& scale,
                  void* cuda_stream);
void adam_update(const AdamBucket& bucket, void* cuda_stream);
void sum_squares(const void* values, Dtype type, int64_t numel, double* partials, void* cuda_stream);
void quantise(const QuantiseArgs& args, void* cuda_stream);  // floats aligned to 4 bytes; to 16 is faster
void dequantise_sum(const DequantiseArgs& args, void* cuda_stream);
}  // namespace cuda
#endif

}  // namespace far
