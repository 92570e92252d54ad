#include "cpu/isa.h"

#include <cstdlib>
#include <cstring>

#include "kernels/adam.h"

namespace far {

FAR_DECLARE_PER_ISA(adam_update, (const AdamBucket*, int64_t, int))
FAR_DECLARE_PER_ISA(sum_squares, (const void*, Dtype, int64_t, double*, int))
FAR_DECLARE_PER_ISA(quantise, (const QuantiseArgs&, int))
FAR_DECLARE_PER_ISA(dequantise_sum, (const DequantiseArgs&, int))
FAR_DECLARE_PER_ISA(tvl1, (const Tvl1Args&, int))

namespace cpu {

static Isa detect() {
#if defined(__x86_64__)
  Isa best = Isa::base;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2"))
    best = Isa::avx2;
  if (best == Isa::avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    best = Isa::avx512;
  const char* limit = std::getenv("FASTACTREC_ISA");  // for tests and comparisons: never raises what was detected
  if (limit && !std::strcmp(limit, "base")) return Isa::base;
  if (limit && !std::strcmp(limit, "avx2") && best == Isa::avx512) return Isa::avx2;
  return best;
#else
  return Isa::base;
#endif
}

Isa isa() {
  static const Isa chosen = detect();
  return chosen;
}

const char* isa_name() {
  return isa() == Isa::avx512 ? "avx512" : isa() == Isa::avx2 ? "avx2" : "base";
}

void adam_advance(AdamSegment* segments, int64_t count, const AdamGroup* groups, const AdamScale& scale) {
  for (int64_t i = 0; i < count; ++i) far::adam_advance(segments[i], groups[segments[i].group], scale);
}

void adam_update(const AdamBucket* buckets, int64_t count, int threads) {
  FAR_CALL_PER_ISA(adam_update, buckets, count, threads);
}

void sum_squares(const void* values, Dtype type, int64_t numel, double* partials, int threads) {
  FAR_CALL_PER_ISA(sum_squares, values, type, numel, partials, threads);
}

void quantise(const QuantiseArgs& args, int threads) { FAR_CALL_PER_ISA(quantise, args, threads); }

void dequantise_sum(const DequantiseArgs& args, int threads) { FAR_CALL_PER_ISA(dequantise_sum, args, threads); }

void tvl1(const Tvl1Args& args, int threads) { FAR_CALL_PER_ISA(tvl1, args, threads); }

}  // namespace cpu
}  // namespace far
