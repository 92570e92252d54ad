// One element, and the per-parameter coefficients, of Adam / AdamW (Kingma & Ba 2015, Algorithm 1; Loshchilov & Hutter
// 2019; amsgrad: Reddi et al. 2018), with bias correction by carried masses: alpha = lr / a, inv_sqrt_mass = 1 / sqrt(b).
// AdamW's decay is subtracted together with the update, so that the parameter is rounded once.
#pragma once

#include <cmath>

#include "common/host_device.h"
#include "kernels/number.h"
#include "launch.h"

namespace far {

// One step of one parameter's masses, in double, and what its elements need to know of it. A parameter without a
// gradient, or any parameter when a loss scaler found an overflow, keeps its state and becomes inactive.
FAR_HD void adam_advance(AdamSegment& s, const AdamGroup& group, const AdamScale& scale) {
  AdamCoefficients& c = s.now;
  c.active = s.live != 0 && !(scale.found_inf && *scale.found_inf != 0);
  if (!c.active) return;
  s.mass = group.beta1 * s.mass + (1 - group.beta1);
  s.mass_sq = group.beta2 * s.mass_sq + (1 - group.beta2);
  s.step += 1;
  double factor = scale.grad_scale ? 1 / double(*scale.grad_scale) : 1.0;
  if (scale.squares) {  // as torch.nn.utils.clip_grad_norm_; a NaN norm gives NaN gradients
    const double clip = scale.max_norm / (sqrt(*scale.squares) * factor + 1e-6);
    factor *= clip > 1 ? 1.0 : clip;
  }
  c.alpha = float(group.lr / s.mass);
  c.inv_sqrt_mass = float(1 / sqrt(s.frozen_mass > 0 ? s.frozen_mass : s.mass_sq));
  c.beta1 = float(group.beta1);
  c.beta2 = float(group.beta2);
  c.one_minus_beta1 = float(1 - group.beta1);
  c.one_minus_beta2 = float(1 - group.beta2);
  c.eps = float(group.eps);
  c.l2 = group.decoupled ? 0.f : float(group.weight_decay);
  c.decay = group.decoupled ? float(group.lr * group.weight_decay) : 0.f;
  c.grad_factor = float(group.maximize ? -factor : factor);
  c.seed = mix_bits(s.key * 0x9e3779b9u + uint32_t(s.step));
}

// `max_exp_avg_sq` is null without amsgrad, `frozen_sq` unless it takes the place of exp_avg_sq.
FAR_HD void adam_update(float& weight, float grad, float& exp_avg, float& exp_avg_sq, float* max_exp_avg_sq,
                        const float* frozen_sq, const AdamCoefficients& c) {
  const float w = weight;
  // Without decay the weight must not enter: zero times an infinite one would be NaN.
  const float g = grad * c.grad_factor + (c.l2 != 0 ? c.l2 * w : 0.f);
  const float m = c.beta1 * exp_avg + c.one_minus_beta1 * g;
  const float v = c.beta2 * exp_avg_sq + c.one_minus_beta2 * (g * g);
  exp_avg = m;
  exp_avg_sq = v;
  float largest = v;
  if (max_exp_avg_sq) {  // NaN on either side wins, as in torch
    const float before = *max_exp_avg_sq;
    largest = v < before || before != before ? before : v;
    *max_exp_avg_sq = largest;
  }
  if (frozen_sq) largest = *frozen_sq;
  const float decay = c.decay != 0 ? c.decay * w : 0.f;
  weight = w - (c.alpha * m / (sqrtf(largest) * c.inv_sqrt_mass + c.eps) + decay);
}

// The master of a smaller parameter, or the parameter itself where somebody wrote to it: it is no longer the rounded
// master. Compared as bits, so that a sign of zero and NaN count.
FAR_HD float adam_follow(float master, uint16_t param, Dtype type) {
  const bool bf16 = type == Dtype::bf16;
  const uint16_t rounded = bf16 ? float_to_bf16(master) : float_to_f16(master);
  return rounded == param ? master : bf16 ? bf16_to_float(param) : f16_to_float(param);
}

// Random bits for the two moments of element `i` of a parameter, from the parameter, the step and i alone: the same on
// every machine, in every bucket, and after a resume.
FAR_HD uint32_t adam_noise(const AdamCoefficients& c, int64_t i) { return mix_bits(uint32_t(i) ^ c.seed); }

}  // namespace far
