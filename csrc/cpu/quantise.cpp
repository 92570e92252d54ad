#include "kernels/quantise.h"

#include <algorithm>
#include <cstring>

#include "common/parallel.h"

namespace far {
namespace FAR_ISA {

namespace {

constexpr int64_t size = quantise_block, half = size / 2;
constexpr int64_t blocks_per_task = 256;  // 65536 elements, as adam.cpp. Its prefetching gained nothing here.

// y = factor * (values - reference) + residual, and the largest magnitude in it.
template <bool subtract, bool add>
inline uint32_t gather(const float* values, const float* reference, const float* residual, float factor,
                       float* __restrict__ y) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < size; ++i) {
    float x = factor * (subtract ? values[i] - reference[i] : values[i]);
    if (add) x += residual[i];
    y[i] = x;
    largest = std::max(largest, magnitude(x));
  }
  return largest;
}

// Codes of a block of y, and what they lack if somebody keeps it. Both loops of a block have a constant length and no
// condition inside, so that they vectorise for every instruction set.
template <int bits, bool keep>
inline void encode(const float* __restrict__ y, const BlockScale& s, uint8_t* __restrict__ codes,
                   float* __restrict__ residual) {
  if constexpr (bits == 16) {
    uint16_t* __restrict__ to = reinterpret_cast<uint16_t*>(codes);
    for (int64_t i = 0; i < size; ++i) {
      const uint16_t code = float_to_bf16(one_nan(y[i]));
      to[i] = code;
      if (keep) residual[i] = one_nan(y[i] - bf16_to_float(code));
    }
  } else if constexpr (bits == 8) {
    for (int64_t i = 0; i < size; ++i) {
      float decoded;
      codes[i] = uint8_t(quantise(y[i], s, decoded));
      if (keep) residual[i] = one_nan(y[i] - decoded);
    }
  } else {
    for (int64_t i = 0; i < half; ++i) {
      float low, high;
      codes[i] = uint8_t(quantise(y[i], s, low) | quantise(y[i + half], s, high) << 4);
      if (!keep) continue;
      residual[i] = one_nan(y[i] - low);
      residual[i + half] = one_nan(y[i + half] - high);
    }
  }
}

template <int bits>
inline void quantise_whole(const float* values, const float* reference, float* residual, float factor, uint8_t* codes,
                           uint8_t* scale) {
  alignas(64) float y[size];
  const uint32_t largest = reference ? residual ? gather<true, true>(values, reference, residual, factor, y)
                                                : gather<true, false>(values, reference, residual, factor, y)
                           : residual ? gather<false, true>(values, reference, residual, factor, y)
                                      : gather<false, false>(values, reference, residual, factor, y);
  BlockScale s{};
  if constexpr (bits != 16) {
    s = block_scale<bits>(largest);
    memcpy(scale, &s.scale, sizeof s.scale);
  }
  residual ? encode<bits, true>(y, s, codes, residual) : encode<bits, false>(y, s, codes, residual);
}

template <int bits>
void quantise_range(const QuantiseArgs& a, int64_t first, int64_t last) {
  const int64_t blocks = quantise_blocks(a.numel);
  for (int64_t b = first; b < last; ++b) {
    const int64_t at = b * size, n = std::min(size, a.numel - at);
    const float* values = a.values + at;
    const float* reference = a.reference ? a.reference + at : nullptr;
    float* residual = a.residual ? a.residual + at : nullptr;
    uint8_t* codes = a.payload + b * code_bytes(bits);
    uint8_t* scale = a.payload + blocks * code_bytes(bits) + b * int64_t(sizeof(float));
    if (n == size) {
      quantise_whole<bits>(values, reference, residual, a.factor, codes, scale);
      continue;
    }
    float whole[3][size] = {};  // the last block, with zeros to its end
    for (int64_t i = 0; i < n; ++i) {
      whole[0][i] = values[i];
      if (reference) whole[1][i] = reference[i];
      if (residual) whole[2][i] = residual[i];
    }
    quantise_whole<bits>(whole[0], reference ? whole[1] : nullptr, residual ? whole[2] : nullptr, a.factor, codes,
                         scale);
    for (int64_t i = 0; residual && i < n; ++i) residual[i] = whole[2][i];
  }
}

// Adds block `b` of `count` rows, one after the other, in one pass over the sums.
template <int bits, int count>
inline void add_rows(const DequantiseArgs& a, int64_t row, int64_t b, int64_t blocks, float* __restrict__ sum) {
  const uint8_t* codes[count];
  float scale[count];
  for (int k = 0; k < count; ++k) {
    const uint8_t* payload = a.payloads + (row + k) * a.stride;
    codes[k] = payload + b * code_bytes(bits);
    if constexpr (bits != 16)
      memcpy(&scale[k], payload + blocks * code_bytes(bits) + b * int64_t(sizeof(float)), sizeof(float));
  }
  if constexpr (bits == 16) {
    for (int64_t i = 0; i < size; ++i)
      for (int k = 0; k < count; ++k) sum[i] += bf16_to_float(reinterpret_cast<const uint16_t*>(codes[k])[i]);
  } else if constexpr (bits == 8) {
    for (int64_t i = 0; i < size; ++i)
      for (int k = 0; k < count; ++k) sum[i] += dequantise<8>(codes[k][i], scale[k]);
  } else {
    for (int64_t i = 0; i < half; ++i)
      for (int k = 0; k < count; ++k) {
        const uint32_t code = codes[k][i];
        sum[i] += dequantise<4>(code, scale[k]);
        sum[i + half] += dequantise<4>(code >> 4, scale[k]);
      }
  }
}

template <int bits>
void sum_range(const DequantiseArgs& a, int64_t first, int64_t last) {
  constexpr int together = 4;
  const int64_t blocks = quantise_blocks(a.numel);
  alignas(64) float sum[size];
  for (int64_t b = first; b < last; ++b) {
    for (int64_t i = 0; i < size; ++i) sum[i] = 0;
    int64_t row = 0;
    for (; row + together <= a.rows; row += together) add_rows<bits, together>(a, row, b, blocks, sum);
    for (; row < a.rows; ++row) add_rows<bits, 1>(a, row, b, blocks, sum);
    const int64_t at = b * size, n = std::min(size, a.numel - at);
    if (a.base)  // into the local array, since the compiler must think that base and out may overlap
      for (int64_t i = 0; i < n; ++i) sum[i] += a.base[at + i];
    for (int64_t i = 0; i < n; ++i) a.out[at + i] = one_nan(sum[i]);
  }
}

template <class Args>
void over_blocks(const Args& args, int threads, void (*body)(const Args&, int64_t, int64_t)) {
  const int64_t blocks = quantise_blocks(args.numel);
  parallel_for((blocks + blocks_per_task - 1) / blocks_per_task, threads, [&](int64_t task) {
    body(args, task * blocks_per_task, std::min((task + 1) * blocks_per_task, blocks));
  });
}

}  // namespace

void quantise(const QuantiseArgs& a, int threads) {
  over_blocks(a, threads, a.bits == 16 ? quantise_range<16> : a.bits == 8 ? quantise_range<8> : quantise_range<4>);
  const int64_t blocks = quantise_blocks(a.numel), padding = padded_scales(a.numel, a.bits) - blocks;
  if (padding > 0)
    memset(a.payload + blocks * (code_bytes(a.bits) + int64_t(sizeof(float))), 0, padding * sizeof(float));
}

void dequantise_sum(const DequantiseArgs& a, int threads) {
  over_blocks(a, threads, a.bits == 16 ? sum_range<16> : a.bits == 8 ? sum_range<8> : sum_range<4>);
}

}  // namespace FAR_ISA
}  // namespace far
