// Compression's CUDA entries for test_cuda_quantise.py.
#include "emulated/shim.h"
#include "launch.h"

using namespace far;

// The floats of a call begin `offset` elements behind the arrays', which lie at multiples of 16 bytes.
template <class Float>
static Float* from(Float* array, int64_t offset) {
  return array ? array + offset : nullptr;
}

extern "C" {

const char* quantise(int64_t seed, int64_t offset, const float* values, const float* reference, float* residual,
                     uint8_t* payload, double factor, int64_t bits, int64_t numel) {
  return guarded(seed, [=] {
    cuda::quantise(QuantiseArgs{from(values, offset), from(reference, offset), from(residual, offset), payload,
                                float(factor), int(bits), numel},
                   nullptr);
  });
}

const char* dequantise_sum(int64_t seed, int64_t offset, const uint8_t* payloads, int64_t rows, int64_t stride,
                           const float* base, float* out, int64_t bits, int64_t numel) {
  return guarded(seed, [=] {
    cuda::dequantise_sum(
        DequantiseArgs{payloads, rows, stride, from(base, offset), from(out, offset), int(bits), numel}, nullptr);
  });
}

}  // extern "C"
