"""TV-L1 written plainly: NumPy in float64, one whole-image expression per equation of the papers.

Zach, Pock & Bischof 2007; Sánchez, Meinhardt-Llopis & Facciolo 2013; Keys 1981 (cubic convolution).
"""

import numpy as np


def resize(image, height, width):
    """Bilinear, pixel centres at halves, edge replicated."""

    def samples(n, source):
        at = np.clip((np.arange(n) + 0.5) * source / n - 0.5, 0, source - 1)
        low = np.floor(at).astype(int)
        return low, np.minimum(low + 1, source - 1), at - low

    top, bottom, y = samples(height, image.shape[0])
    left, right, x = samples(width, image.shape[1])
    rows = image[top] * (1 - y)[:, None] + image[bottom] * y[:, None]
    return rows[:, left] * (1 - x) + rows[:, right] * x


def cubic(image, at_y, at_x):
    """Value and x, y derivatives of the Catmull-Rom interpolant through the pixels; edge replicated."""
    height, width = image.shape
    top, left = np.floor(at_y).astype(int), np.floor(at_x).astype(int)
    value, dx, dy = np.zeros((3, *at_y.shape))
    for j in range(-1, 3):
        for i in range(-1, 3):
            tap = image[np.clip(top + j, 0, height - 1), np.clip(left + i, 0, width - 1)]
            (wy, sy), (wx, sx) = keys(at_y - top - j), keys(at_x - left - i)
            value, dx, dy = value + tap * wy * wx, dx + tap * wy * sx, dy + tap * sy * wx
    return value, dx, dy


def keys(t):
    """Keys' cubic kernel with a = -1/2, and its derivative."""
    s, sign = np.abs(t), np.sign(t)
    near, far = 1.5 * s**3 - 2.5 * s**2 + 1, -0.5 * s**3 + 2.5 * s**2 - 4 * s + 2
    near_slope, far_slope = 4.5 * s**2 - 5 * s, -1.5 * s**2 + 5 * s - 4
    inside, outside = s <= 1, (s > 1) & (s <= 2)
    return inside * near + outside * far, sign * (inside * near_slope + outside * far_slope)


def gradient(u):
    return np.diff(u, axis=1, append=u[:, -1:]), np.diff(u, axis=0, append=u[-1:])


def divergence(px, py):
    return np.diff(px, axis=1, prepend=0) + np.diff(py, axis=0, prepend=0)


def medianed(u, side):
    windows = np.lib.stride_tricks.sliding_window_view(np.pad(u, side // 2, mode="edge"), (side, side))
    return np.median(windows, axis=(2, 3))


def tvl1(prev, next, tau, lam, theta, scales, scale_step, warps, iterations, median=0):
    pyramid = [(prev.astype(float), next.astype(float))]
    while len(pyramid) < scales:
        height, width = (round(side * scale_step) for side in pyramid[-1][0].shape)
        if min(height, width) < 16:
            break
        pyramid.append(tuple(resize(image, height, width) for image in pyramid[-1]))
    flow = np.zeros((2, *pyramid[-1][0].shape))
    for a, b in reversed(pyramid):
        height, width = a.shape
        gain = width / flow.shape[2], height / flow.shape[1]
        flow = np.stack([g * resize(u, height, width) for g, u in zip(gain, flow, strict=True)])
        dual = np.zeros((2, 2, height, width))
        y, x = np.mgrid[:height, :width]
        for _ in range(warps):
            if median:
                flow = np.stack([medianed(u, median) for u in flow])
            at_x, at_y = x + flow[0], y + flow[1]
            seen = (at_x >= 0) & (at_x <= width - 1) & (at_y >= 0) & (at_y <= height - 1)
            warped, ix, iy = cubic(b, np.clip(at_y, 0, height - 1), np.clip(at_x, 0, width - 1))
            square = ix**2 + iy**2
            seen &= square > 1e-6
            constant = warped - ix * flow[0] - iy * flow[1] - a
            for _ in range(iterations):
                rho = constant + ix * flow[0] + iy * flow[1]
                step = np.where(seen, np.clip(-rho / np.where(seen, square, 1), -lam * theta, lam * theta), 0)
                move = step * ix, step * iy
                flow = np.stack([u + m + theta * divergence(*p) for u, m, p in zip(flow, move, dual, strict=True)])
                for p, u in zip(dual, flow, strict=True):
                    ux, uy = gradient(u)
                    p[:] = (p + tau / theta * np.stack([ux, uy])) / (1 + tau / theta * np.hypot(ux, uy))
    return flow
