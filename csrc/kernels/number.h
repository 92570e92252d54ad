// bfloat16 and IEEE half as bit patterns, the same on host and device: no intrinsics, whose rounding of NaN differs.
#pragma once

#include <cstdint>
#include <cstring>

#include "common/host_device.h"

namespace far {

FAR_HD uint32_t bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

FAR_HD float float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

FAR_HD float bf16_to_float(uint16_t bits) { return float_of(uint32_t(bits) << 16); }

// To nearest, ties to even; NaN stays NaN.
FAR_HD uint16_t float_to_bf16(float value) {
  const uint32_t bits = bits_of(value);
  const bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return uint16_t(nan ? (bits >> 16) | 0x40u : rounded);
}

// Up or down with probabilities that keep the mean: `noise` is uniform in 0..65535, the part of a float that bfloat16
// drops. Infinities and NaN are not rounded.
FAR_HD uint16_t float_to_bf16_stochastic(float value, uint32_t noise) {
  const uint32_t bits = bits_of(value);
  const bool finite = (bits & 0x7f800000u) != 0x7f800000u;
  const uint32_t nan = (bits & 0x7fffffu) != 0 ? 0x400000u : 0u;
  return uint16_t((finite ? bits + noise : bits | nan) >> 16);
}

// Half: 5 exponent bits of bias 15, 10 of mantissa. Multiplying by a power of two moves between the biases and makes
// subnormal numbers right on the way, without a branch.
FAR_HD float f16_to_float(uint16_t bits) {
  const uint32_t magnitude = uint32_t(bits & 0x7fffu) << 13;
  const uint32_t special = magnitude >= 0x0f800000u ? 0x7f800000u | magnitude : 0u;  // infinity, NaN
  const float scaled = float_of(magnitude) * 0x1p112f;                               // exact
  return float_of((special ? special : bits_of(scaled)) | uint32_t(bits & 0x8000u) << 16);
}

// To nearest, ties to even; beyond 65504 (half a unit above) infinity; NaN stays NaN.
FAR_HD uint16_t float_to_f16(float value) {
  const uint32_t bits = bits_of(value), sign = bits & 0x80000000u, magnitude = bits ^ sign;
  // Normal halves: add half a unit of the last place kept, change the bias, drop 13 bits; a carry may reach infinity.
  const uint32_t normal = (magnitude - 0x38000000u + 0xfffu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormal halves: at 0.5 the last place of a float is 2^-24, that of a half; the addition rounds.
  const uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - 0x3f000000u;
  const uint32_t nan = 0x7e00u | ((magnitude >> 13) & 0x3ffu);
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x47800000u ? 0x7c00u : half;
  half = magnitude > 0x7f800000u ? nan : half;
  return uint16_t(half | sign >> 16);
}

// A 32-bit mixing function, for random numbers that depend on a counter alone (constants of lowbias32: C. Wellons,
// "Prospecting for Hash Functions", 2018).
FAR_HD uint32_t mix_bits(uint32_t x) {
  x ^= x >> 16;
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  x ^= x >> 16;
  return x;
}

}  // namespace far
