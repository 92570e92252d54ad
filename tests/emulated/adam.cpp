// Adam's CUDA entries for test_cuda_adam.py.
#include "emulated/shim.h"
#include "launch.h"

using namespace far;

extern "C" {

const char* adam_advance(int64_t seed, AdamSegment* segments, int64_t count, const AdamGroup* groups,
                         const float* grad_scale, const float* found_inf, const double* squares, double max_norm) {
  return guarded(seed, [=] {
    cuda::adam_advance(segments, count, groups, AdamScale{grad_scale, found_inf, squares, max_norm}, nullptr);
  });
}

const char* adam_update(int64_t seed, float* weight, const void* grad, void* exp_avg, void* exp_avg_sq,
                        float* max_exp_avg_sq, const float* frozen_sq, void* param, void* out, int64_t grad_type, int64_t moment_type,
                        int64_t out_type, int64_t numel, const AdamSegment* segments, int64_t count,
                        const int32_t* first) {
  return guarded(seed, [=] {
    cuda::adam_update(AdamBucket{weight, grad, exp_avg, exp_avg_sq, max_exp_avg_sq, frozen_sq, param, out, Dtype(grad_type),
                                 Dtype(moment_type), Dtype(out_type), numel, segments, count, first},
                      nullptr);
  });
}

const char* sum_squares(int64_t seed, const void* values, int64_t type, int64_t numel, double* partials) {
  return guarded(seed, [=] { cuda::sum_squares(values, Dtype(type), numel, partials, nullptr); });
}

}  // extern "C"
