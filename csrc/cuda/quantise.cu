#include "cuda/launch.cuh"
#include "kernels/quantise.h"

namespace far {
namespace cuda {

namespace {

// A warp takes a block: each lane four neighbours of its first half and the four 128 elements behind, so that a warp
// reads floats as 512 bytes in a row, and a lane's 4-bit codes are the four bytes that it owns.
constexpr int lanes = 32, warps = 8, threads = lanes * warps;
constexpr int64_t half_block = quantise_block / 2;
static_assert(half_block == 4 * lanes);

// Four floats from element `at` on, of an array of numel; zeros behind its end. `wide`: the array begins at a multiple
// of 16 bytes.
__device__ inline float4 load4(const float* array, int64_t at, int64_t numel, bool wide) {
  if (wide && numel - at > 3) return *reinterpret_cast<const float4*>(array + at);
  float4 x = make_float4(0.f, 0.f, 0.f, 0.f);
  if (numel - at > 0) x.x = array[at];
  if (numel - at > 1) x.y = array[at + 1];
  if (numel - at > 2) x.z = array[at + 2];
  if (numel - at > 3) x.w = array[at + 3];
  return x;
}

__device__ inline void store4(float* array, int64_t at, int64_t numel, bool wide, const float4& x) {
  if (wide && numel - at > 3) {
    *reinterpret_cast<float4*>(array + at) = x;
    return;
  }
  if (numel - at > 0) array[at] = x.x;
  if (numel - at > 1) array[at + 1] = x.y;
  if (numel - at > 2) array[at + 2] = x.z;
  if (numel - at > 3) array[at + 3] = x.w;
}

// One operation on each of four numbers.
template <class Operation>
__device__ inline float4 each(const float4& x, const float4& y, Operation operation) {
  return make_float4(operation(x.x, y.x), operation(x.y, y.y), operation(x.z, y.z), operation(x.w, y.w));
}

__device__ inline float4 gather(const QuantiseArgs& a, int64_t at, bool wide) {
  float4 y = load4(a.values, at, a.numel, wide);
  if (a.reference)
    y = each(y, load4(a.reference, at, a.numel, wide), [](float value, float reference) { return value - reference; });
  const float factor = a.factor;
  y = each(y, y, [factor](float value, float) { return factor * value; });
  if (a.residual)
    y = each(y, load4(a.residual, at, a.numel, wide), [](float value, float residual) { return value + residual; });
  return y;
}

__device__ inline void keep(const QuantiseArgs& a, int64_t at, bool wide, const float4& y, const float4& decoded) {
  if (a.residual)
    store4(a.residual, at, a.numel, wide, each(y, decoded, [](float v, float d) { return one_nan(v - d); }));
}

__device__ inline ushort4 to_bf16(const float4& x) {
  return make_ushort4(float_to_bf16(one_nan(x.x)), float_to_bf16(one_nan(x.y)), float_to_bf16(one_nan(x.z)),
                      float_to_bf16(one_nan(x.w)));
}

__device__ inline float4 from_bf16(const ushort4& x) {
  return make_float4(bf16_to_float(x.x), bf16_to_float(x.y), bf16_to_float(x.z), bf16_to_float(x.w));
}

// Four codes as the bytes of a word, the first one lowest.
__device__ inline uint32_t encode(const float4& y, const BlockScale& s, float4& decoded) {
  return quantise(y.x, s, decoded.x) | quantise(y.y, s, decoded.y) << 8 | quantise(y.z, s, decoded.z) << 16 |
         quantise(y.w, s, decoded.w) << 24;
}

template <int bits>
__device__ inline float4 decode(uint32_t codes, float scale) {
  return make_float4(dequantise<bits>(codes, scale), dequantise<bits>(codes >> 8, scale),
                     dequantise<bits>(codes >> 16, scale), dequantise<bits>(codes >> 24, scale));
}

__device__ inline uint32_t largest_of(const float4& y) {
  return max(max(magnitude(y.x), magnitude(y.y)), max(magnitude(y.z), magnitude(y.w)));
}

template <int bits>
__global__ void __launch_bounds__(threads) quantise_kernel(QuantiseArgs a, bool wide) {
  const int64_t blocks = quantise_blocks(a.numel), block = int64_t(blockIdx.x) * warps + threadIdx.x / lanes;
  if (block >= blocks) return;  // a whole warp
  const int lane = int(threadIdx.x) % lanes;
  const int64_t at = block * quantise_block + 4 * lane;
  const float4 low = gather(a, at, wide), high = gather(a, at + half_block, wide);
  uint8_t* codes = a.payload + block * code_bytes(bits);
  if constexpr (bits == 16) {
    const ushort4 first = to_bf16(low), second = to_bf16(high);
    reinterpret_cast<ushort4*>(codes)[lane] = first;
    reinterpret_cast<ushort4*>(codes)[lane + lanes] = second;
    keep(a, at, wide, low, from_bf16(first));
    keep(a, at + half_block, wide, high, from_bf16(second));
  } else {
    uint32_t largest = max(largest_of(low), largest_of(high));
    for (int flip = lanes / 2; flip > 0; flip /= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, flip));
    const BlockScale s = block_scale<bits>(largest);
    float* scales = reinterpret_cast<float*>(a.payload + blocks * code_bytes(bits));
    if (lane == 0) scales[block] = s.scale;
    if (block == blocks - 1 && lane < padded_scales(a.numel, bits) - blocks) scales[blocks + lane] = 0;
    float4 decoded_low, decoded_high;
    const uint32_t first = encode(low, s, decoded_low), second = encode(high, s, decoded_high);
    if (bits == 8) {
      reinterpret_cast<uint32_t*>(codes)[lane] = first;
      reinterpret_cast<uint32_t*>(codes)[lane + lanes] = second;
    } else {
      reinterpret_cast<uint32_t*>(codes)[lane] = first | second << 4;
    }
    keep(a, at, wide, low, decoded_low);
    keep(a, at + half_block, wide, high, decoded_high);
  }
}

template <int bits>
__global__ void __launch_bounds__(threads) dequantise_kernel(DequantiseArgs a, bool wide) {
  const int64_t blocks = quantise_blocks(a.numel), block = int64_t(blockIdx.x) * warps + threadIdx.x / lanes;
  if (block >= blocks) return;
  const int lane = int(threadIdx.x) % lanes;
  const auto add = [](float x, float y) { return x + y; };
  float4 low = make_float4(0.f, 0.f, 0.f, 0.f), high = low;
  const uint8_t* payload = a.payloads;
  for (int64_t row = 0; row < a.rows; ++row, payload += a.stride) {
    const uint8_t* codes = payload + block * code_bytes(bits);
    if constexpr (bits == 16) {
      low = each(low, from_bf16(reinterpret_cast<const ushort4*>(codes)[lane]), add);
      high = each(high, from_bf16(reinterpret_cast<const ushort4*>(codes)[lane + lanes]), add);
    } else {
      const float scale = reinterpret_cast<const float*>(payload + blocks * code_bytes(bits))[block];
      const uint32_t first = reinterpret_cast<const uint32_t*>(codes)[lane];
      const uint32_t second = bits == 8 ? reinterpret_cast<const uint32_t*>(codes)[lane + lanes] : first >> 4;
      low = each(low, decode<bits>(first, scale), add);
      high = each(high, decode<bits>(second, scale), add);
    }
  }
  const int64_t at = block * quantise_block + 4 * lane;
  if (a.base) {
    low = each(low, load4(a.base, at, a.numel, wide), add);
    high = each(high, load4(a.base, at + half_block, a.numel, wide), add);
  }
  const auto clean = [](float x, float) { return one_nan(x); };
  store4(a.out, at, a.numel, wide, each(low, low, clean));
  store4(a.out, at + half_block, a.numel, wide, each(high, high, clean));
}

template <class Args>
void launch_for(void (*kernel)(Args, bool), const Args& a, bool wide, void* cuda_stream) {
  if (a.numel == 0) return;
  launch(kernel, dim3(unsigned((quantise_blocks(a.numel) + warps - 1) / warps)), dim3(threads), cuda_stream, a, wide);
}

bool aligned(const void* a, const void* b, const void* c) {  // null is
  return ((reinterpret_cast<uintptr_t>(a) | reinterpret_cast<uintptr_t>(b) | reinterpret_cast<uintptr_t>(c)) & 15) == 0;
}

}  // namespace

void quantise(const QuantiseArgs& a, void* cuda_stream) {
  launch_for(a.bits == 16 ? quantise_kernel<16> : a.bits == 8 ? quantise_kernel<8> : quantise_kernel<4>, a,
             aligned(a.values, a.reference, a.residual), cuda_stream);
}

void dequantise_sum(const DequantiseArgs& a, void* cuda_stream) {
  launch_for(a.bits == 16 ? dequantise_kernel<16> : a.bits == 8 ? dequantise_kernel<8> : dequantise_kernel<4>, a,
             aligned(a.base, a.out, nullptr), cuda_stream);
}

}  // namespace cuda
}  // namespace far
