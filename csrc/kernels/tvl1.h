// One pixel of TV-L1 optical flow (Zach, Pock & Bischof 2007; Sánchez, Meinhardt-Llopis & Facciolo, IPOL 2013).
// Flow (u1, u2) is x, y in pixels; (p11, p12) and (p21, p22) are the dual fields of u1 and u2, times theta.
#pragma once

#include <cmath>

#include "common/host_device.h"

namespace far {

// Where pixel `i` of a line of `size` pixels falls in one of `source_size`, pixel centres at halves:
// source[index] and source[next], blended by `part`.
struct Tvl1Sample {
  int index, next;
  float part;
};

FAR_HD Tvl1Sample tvl1_sample(int i, float ratio, int source_size) {
  float at = (float(i) + 0.5f) * ratio - 0.5f;
  at = at > 0.f ? at : 0.f;
  int index = int(at);
  index = index < source_size - 1 ? index : source_size - 1;
  return {index, index < source_size - 1 ? index + 1 : index, at - float(index)};
}

FAR_HD float tvl1_blend(float a, float b, float part) { return a + part * (b - a); }

// The data term of one pixel, linearised around the present flow: residual rho + ix u1 + iy u2, and
// inv = 1 / (ix^2 + iy^2), or 0 where nothing is to be learnt: outside the other image, or where it is flat.
struct Tvl1Data {
  float ix, iy, rho, inv;
};

// Cubic convolution (Keys 1981, a = -1/2) between taps 1 and 2, and its derivative: at t = 0 the central difference.
FAR_HD void tvl1_cubic(float t, float* value, float* slope) {
  value[0] = ((-0.5f * t + 1.f) * t - 0.5f) * t;
  value[1] = (1.5f * t - 2.5f) * t * t + 1.f;
  value[2] = ((-1.5f * t + 2.f) * t + 0.5f) * t;
  value[3] = (0.5f * t - 0.5f) * t * t;
  slope[0] = (-1.5f * t + 2.f) * t - 0.5f;
  slope[1] = (4.5f * t - 5.f) * t;
  slope[2] = (-4.5f * t + 4.f) * t + 0.5f;
  slope[3] = (1.5f * t - 1.f) * t;
}

// `next` points to pixel (0, 0) of an image that is replicated by one pixel above and left, two below and right.
// A flow that is not finite stays inside the image.
FAR_HD Tvl1Data tvl1_warp(float prev, const float* next, int step, int height, int width, int x, int y, float u1,
                          float u2) {
  const float right = float(width - 1), bottom = float(height - 1);
  const float to_x = float(x) + u1, to_y = float(y) + u2;
  float at_x = to_x > 0.f ? to_x : 0.f;
  float at_y = to_y > 0.f ? to_y : 0.f;
  at_x = at_x < right ? at_x : right;
  at_y = at_y < bottom ? at_y : bottom;
  const int left = int(at_x), top = int(at_y);
  float wx[4], dx[4], wy[4], dy[4];
  tvl1_cubic(at_x - float(left), wx, dx);
  tvl1_cubic(at_y - float(top), wy, dy);
  const int at = top * step + left;
  float value = 0.f, ix = 0.f, iy = 0.f;
  for (int j = 0; j < 4; ++j) {
    const float* tap = next + (j - 1) * step - 1;
    const float a = tap[at], b = (tap + 1)[at], c = (tap + 2)[at], d = (tap + 3)[at];
    const float line = a * wx[0] + b * wx[1] + c * wx[2] + d * wx[3];
    value += line * wy[j];
    iy += line * dy[j];
    ix += (a * dx[0] + b * dx[1] + c * dx[2] + d * dx[3]) * wy[j];
  }
  const float square = ix * ix + iy * iy;
  const float inside = fabsf(to_x - at_x) + fabsf(to_y - at_y) == 0.f ? 1.f : 0.f;
  return {ix, iy, value - prev - (ix * u1 + iy * u2), square > 1e-6f ? inside / square : 0.f};
}

// Thresholding step and primal update (IPOL, equations 15 and 17): limit = lam theta; div is the divergence of p.
FAR_HD void tvl1_primal(float& u1, float& u2, float div1, float div2, const Tvl1Data& d, float limit) {
  float move = (d.rho + d.ix * u1 + d.iy * u2) * d.inv;
  move = move > -limit ? move : -limit;
  move = move < limit ? move : limit;
  u1 = u1 - move * d.ix + div1;
  u2 = u2 - move * d.iy + div2;
}

// Dual update (IPOL, equation 19) of both fields, from the forward differences of u; rate = tau / theta. The two
// quotients share one division.
FAR_HD void tvl1_dual(float& p11, float& p12, float& p21, float& p22, float u1x, float u1y, float u2x, float u2y,
                      float tau, float rate) {
  const float n1 = 1.f + rate * sqrtf(u1x * u1x + u1y * u1y);
  const float n2 = 1.f + rate * sqrtf(u2x * u2x + u2y * u2y);
  const float both = 1.f / (n1 * n2);
  const float r1 = n2 * both, r2 = n1 * both;
  p11 = (p11 + tau * u1x) * r1;
  p12 = (p12 + tau * u1y) * r1;
  p21 = (p21 + tau * u2x) * r2;
  p22 = (p22 + tau * u2y) * r2;
}

}  // namespace far
