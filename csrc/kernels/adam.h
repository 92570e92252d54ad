// One element of Adam / AdamW (Kingma & Ba 2015, Algorithm 1; Loshchilov & Hutter 2019), with bias correction by
// carried masses: alpha = lr / a and inv_sqrt_mass = 1 / sqrt(b) are computed in double on the host. AdamW's decay is
// subtracted together with the update, so that the parameter is rounded once (scaling it first rounds it twice).
#pragma once

#include <cmath>

#include "common/host_device.h"
#include "launch.h"

namespace far {

FAR_HD void adam_update(float& param, float grad, float& exp_avg, float& exp_avg_sq, const AdamSegment& s) {
  const float p = param;
  const float g = grad + s.l2 * p;
  const float m = s.beta1 * exp_avg + s.one_minus_beta1 * g;
  const float v = s.beta2 * exp_avg_sq + s.one_minus_beta2 * (g * g);
  exp_avg = m;
  exp_avg_sq = v;
  param = p - (s.alpha * m / (sqrtf(v) * s.inv_sqrt_mass + s.eps) + s.decay * p);
}

}  // namespace far
