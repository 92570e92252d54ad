// Numbers of 16, 8 or 4 bits for averaging over slow links: layout of a payload and one element's arithmetic.
//
// Elements come in blocks; with 8 and 4 bits a block has a scale of its own, its largest magnitude over 127 or 7, and
// elements are whole multiples of it (block-wise absmax quantisation: Dettmers et al., "8-bit Optimizers via Block-wise
// Quantization", 2022). What rounding loses stays in `residual` for the next time (error feedback: Seide et al., "1-Bit
// Stochastic Gradient Descent", 2014).
//
// A payload holds the codes of whole blocks, the last one padded with zeros, then the scales. 16 bits: bfloat16, no
// scales. 4 bits: byte k of a block holds element k in its low half and element k + 128 in its high one, so that
// neither vectors nor warps have to interleave.
//
// All results are the same bits on every machine, NaN too: its sign and payload are the processor's own choice, so that
// one NaN stands for all wherever one is stored.
#pragma once

#include "common/host_device.h"
#include "kernels/number.h"
#include "launch.h"

namespace far {

constexpr uint32_t infinity_bits = 0x7f800000u, nan_bits = 0x7fc00000u;

FAR_HD int64_t quantise_blocks(int64_t numel) { return (numel + quantise_block - 1) / quantise_block; }

// Bytes of a block's codes, a multiple of 16, so that the scales and the next payload are aligned.
FAR_HD int64_t code_bytes(int bits) { return quantise_block * bits / 8; }

FAR_HD int64_t padded_scales(int64_t numel, int bits) { return bits == 16 ? 0 : (quantise_blocks(numel) + 3) / 4 * 4; }

FAR_HD int64_t payload_bytes(int64_t numel, int bits) {
  return quantise_blocks(numel) * code_bytes(bits) + padded_scales(numel, bits) * int64_t(sizeof(float));
}

FAR_HD float one_nan(float value) {
  return (bits_of(value) & 0x7fffffffu) > infinity_bits ? float_of(nan_bits) : value;
}

// Order as integers is the order of magnitudes, with infinity above every number and NaN above infinity, so that the
// maximum of a block does not depend on how it is found.
FAR_HD uint32_t magnitude(float value) { return bits_of(value) & 0x7fffffffu; }

struct BlockScale {
  float scale, inverse;
  uint32_t mask;  // of a code's bits; 0 where the block holds an infinity or NaN: the scale is then NaN, and so is
                  // every element that is decoded
};

// `largest`: the largest magnitude() of the block.
template <int bits>
FAR_HD BlockScale block_scale(uint32_t largest) {
  constexpr float limit = bits == 8 ? 127.f : 7.f;
  // Below, 1 / scale would be infinite; above, limit * scale. A code rounds to the limit in either case.
  constexpr float low = 0x1p-126f, high = float(0x1.fffffep127 / limit * (1 - 0x1p-23));
  float scale = float_of(largest) / limit;
  scale = scale < low ? low : scale;
  scale = scale > high ? high : scale;
  const bool finite = largest < infinity_bits;
  return {finite ? scale : float_of(nan_bits), finite ? 1 / scale : 0.f, finite ? (1u << bits) - 1 : 0u};
}

// The code of a value: the nearest multiple of the scale, ties to even; `decoded` is what dequantise() makes of it.
// After the addition the last place of the float is 1, so that it has been rounded, and its low bits are the code.
FAR_HD uint32_t quantise(float value, const BlockScale& block, float& decoded) {
  constexpr float shift = 0x1.8p23f;
  const float shifted = value * block.inverse + shift;
  decoded = (shifted - shift) * block.scale;
  return bits_of(shifted) & block.mask;
}

// The value of a code in the low bits of a word, whatever is above them.
template <int bits>
FAR_HD float dequantise(uint32_t code, float scale) {
  return (bits == 8 ? float(int8_t(code)) : float(int32_t(code << 28) >> 28)) * scale;
}

}  // namespace far
