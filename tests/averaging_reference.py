"""ParameterAverager's formulas once more, slowly, in float64, from what the ranks held before each call."""

from __future__ import annotations

import numpy as np

ULP = 2.0**-24
BETAS = {"exp_avg": 0.9, "exp_avg_sq": 0.99, "momentum_buffer": 0.9}
COLUMN = {"exp_avg": 0, "exp_avg_sq": 1}
# Weights are rounded to 2**-24, products and the sums of up to four ranks to float32: at most 8 units in the last place
# of the largest rank's value; doubled.
ROUNDING = 16 * ULP


def due(policy: str, number: int) -> list[str]:
    """Moments averaged in a round."""
    every = {"mean": (1, 1), "desloc": (3, 6), "frozen_v": (1, 1)}.get(policy, (0, 0))
    names = [name for name, k in zip(("exp_avg", "exp_avg_sq"), every, strict=True) if k and number % k == 0]
    return names + (["momentum_buffer"] if "exp_avg" in names else [])


def weighted(weights, values) -> np.ndarray:
    return sum(w * np.asarray(v, np.float64) for w, v in zip(weights, values, strict=True) if w)


class Replay:
    """Follows the calls of all ranks, and compares what each holds after a call with the formula.

    Args:
        options: the averager's.
        first: the ranks' records before training.
        nodes: groups of ranks, with how many averagings inside them go to one of all; None: no hierarchy.
    """

    def __init__(self, options: dict, first: list[dict], nodes: tuple[list[list[int]], int] | None = None):
        self.options, self.world, self.nodes = options, len(first), nodes
        self.policy = options.get("moments", "desloc")
        self.alpha, self.mu = options.get("outer_lr", 1.0), options.get("outer_momentum", 0.0)
        self.outer = self.alpha != 1 or self.mu != 0
        self.delay, self.compression = options.get("delay", 0), options.get("compression")
        self.anchor = first[0]["param"].astype(np.float64)
        self.u = np.zeros_like(self.anchor)
        everybody = list(range(self.world))
        self.shares = {tuple(ranks): np.full(len(ranks), 1 / len(ranks)) for ranks in [everybody, *(nodes or [[]])[0]]}
        self.samples = {ranks: np.zeros(len(ranks)) for ranks in self.shares}
        self.call = self.rounds = self.inside = 0
        self.since = 0  # calls since the last averaging over all ranks
        self.pending = None

    def step(self, samples: list[float], before: list[dict], after: list[dict]) -> bool:
        """One call; returns whether it changed parameters by an averaging. Raises AssertionError."""
        for ranks, collected in self.samples.items():
            collected += [samples[r] for r in ranks]
        self.call += 1
        self.since += 1
        expected = [dict(one) for one in before]
        changed = False
        if self.pending:  # owners round in between
            for want, got in zip(expected, after, strict=True):
                want["owned"] = got["owned"]
        if self.pending and self.call == self.pending["call"] + self.delay:
            self._arrive(expected, after, self.delay)
            changed = True
        if self.call % self.options["period"] == 0:
            changed |= self._round(expected, before, after)
        for want, got in zip(expected, after, strict=True):
            compare(want, got)
        return changed

    def _round(self, expected, before, after) -> bool:
        if self.nodes and self.inside + 1 < self.nodes[1]:
            self.inside += 1
            for ranks in map(tuple, self.nodes[0]):
                names = ("exp_avg", "exp_avg_sq", "momentum_buffer") if self.policy == "mean" else ()
                self._average(ranks, names, expected, before, after, self.options.get("buffers") != "local")
                self.samples[ranks][:] = 0
            return True
        self.inside = 0
        self.rounds += 1
        names = due(self.policy, self.rounds)
        if self.delay:
            weights = self._weights(tuple(range(self.world)))
            self.pending = {"call": self.call, "snaps": before, "after": after, "weights": weights, "names": names}
            for want, got in zip(expected, after, strict=True):
                self._let_pass(want, got)
            self._restart()
            return False
        self._average(tuple(range(self.world)), names, expected, before, after, self.options.get("buffers") != "local")
        self._restart()
        return True

    def all(self, before: list[dict], after: list[dict]) -> None:
        """average_all()."""
        expected = [dict(one) for one in before]
        if self.pending:
            self._arrive(expected, before, self.call - self.pending["call"])
        names = () if self.policy == "reset" else ("exp_avg", "exp_avg_sq", "momentum_buffer")
        self._average(tuple(range(self.world)), names, expected, [dict(one) for one in expected], after, True)
        self._restart()
        self.call = self.rounds = self.inside = 0
        for want, got in zip(expected, after, strict=True):
            compare(want, got)

    def _restart(self) -> None:
        self.since = 0
        for collected in self.samples.values():
            collected[:] = 0

    def _weights(self, ranks: tuple[int, ...]) -> np.ndarray:
        if self.samples[ranks].any():
            self.shares[ranks] = self.samples[ranks] / self.samples[ranks].sum()
        return self.shares[ranks]

    def _average(self, ranks, names, expected, before, after, buffers) -> None:
        weights, members = self._weights(ranks), [before[r] for r in ranks]
        scale = sum(self._scale(one["param"]) for one in members)
        mean = weighted(weights, [self._known(one["param"]) for one in members])
        if self.compression and len(ranks) == self.world:
            mean = mean + self._kept_back(before, after, before)
            scale = scale + np.abs(self.anchor)
        if self.outer:
            scale = scale + 4 * np.abs(self.u) + np.abs(self.anchor)
        if self.outer and self.since:
            d = self.anchor - mean
            self.u = self.mu * self.u + d
            mean = self.anchor - self.alpha * (d + self.mu * self.u)
        for r in ranks:
            expected[r]["param"] = mean, ROUNDING * scale
            self._moments(expected[r], weights, members, names)
            if buffers:
                expected[r]["buffers"] = mean_buffers(weights, [one["buffers"] for one in members])
            if "outer_momentum" in after[r]:
                expected[r]["outer_momentum"] = self.u, ROUNDING * scale
            if "anchor" in after[r]:
                expected[r]["anchor"] = after[r]["param"]
            self._after_round(expected[r], after[r])
        if len(ranks) == self.world:
            self.anchor = after[0]["param"].astype(np.float64)

    @staticmethod
    def _known(value) -> np.ndarray:
        """A recorded value, or the expected one of a round that has just arrived."""
        return np.asarray(value[0] if isinstance(value, tuple) else value, np.float64)

    @classmethod
    def _scale(cls, value) -> np.ndarray:
        """What rounding is relative to."""
        return np.abs(cls._known(value)) + (value[1] / ROUNDING if isinstance(value, tuple) else 0)

    def _after_round(self, expected: dict, after: dict) -> None:
        self._let_pass(expected, after)
        if self.policy == "reset":
            for name in ("exp_avg", "exp_avg_sq", "momentum_buffer"):
                if name in expected:
                    expected[name] = np.zeros_like(expected[name])
            if "rows" in expected:
                expected["rows"] = np.zeros_like(expected["rows"])
        elif self.policy == "frozen_v":
            expected["frozen_sq"] = after["exp_avg_sq"]
            rows, bound = expected["rows"]
            expected["rows"] = np.column_stack([rows[:, :3], rows[:, 1]]), bound

    @staticmethod
    def _let_pass(expected: dict, after: dict) -> None:
        """Rounding errors may be what they are: _kept_back() checks that their sum is what the mean lacks."""
        expected.update({name: after[name] for name in ("residual", "owned") if name in after})

    def _kept_back(self, start, sent, arrived_from, arrived=None) -> np.ndarray:
        """What error feedback adds to a mean: rounding errors of before, less those of now."""
        arrived = arrived or sent
        senders = sum(a["residual"].astype(np.float64) - b["residual"] for a, b in zip(start, sent, strict=True))
        return senders + _owners(arrived_from) - _owners(arrived)

    def _moments(self, expected, weights, members, names, steps=None, mine=None) -> None:
        """Means of moments and masses; with `steps`, what is left of the difference after so many."""
        coarse = 2.0**-7 if self.compression else 0.0  # twice to bfloat16, each within 2**-8
        if "rows" in expected and names:
            rows = self._known(expected["rows"]).copy()
            bound = np.full_like(rows, 1e-6)
        for name in names:
            if name not in expected:
                continue
            values = [self._known(one[name]) for one in members]
            mean, left = weighted(weights, values), 1.0
            scale = sum(self._scale(one[name]) for one in members)
            now = self._known(expected[name])
            if steps is not None:
                left = BETAS[name] ** steps
                mean = now + left * (mean - mine[name])
                scale = scale + np.abs(now)
            if name == "exp_avg_sq":
                mean = np.maximum(mean, 0)
            expected[name] = mean, (ROUNDING + coarse) * scale
            if name in COLUMN and "rows" in expected:
                column = COLUMN[name]
                mass = weighted(weights, [self._known(one["rows"])[:, column] for one in members])
                rows[:, column] = mass
                if steps is not None:
                    was = self._known(expected["rows"])[:, column]
                    rows[:, column] = was + left * (mass - mine["rows"][:, column])
        if "rows" in expected and names and set(names) & set(COLUMN):
            if steps is None:
                rows[:, 2] = np.max([self._known(one["rows"])[:, 2] for one in members], axis=0)
            expected["rows"] = rows, bound

    def _arrive(self, expected, after, steps: int) -> None:
        """A delayed mean: x + (mean - snapshot).

        In average_all() `after` is what was before: owners may have rounded since, which shifts all ranks alike, and
        _average() counts it.
        """
        late, self.pending = self.pending, None
        mean = weighted(late["weights"], [one["param"] for one in late["snaps"]])
        scale = sum(np.abs(one["param"].astype(np.float64)) for one in late["snaps"])
        if self.compression:
            mean = mean + self._kept_back(late["snaps"], late["after"], late["snaps"], after)
            scale = scale + np.abs(self.anchor)
        for r, one in enumerate(expected):
            mine = late["snaps"][r]
            one["param"] = one["param"] + (mean - mine["param"]), ROUNDING * (scale + np.abs(one["param"]))
            self._moments(one, late["weights"], late["snaps"], late["names"], steps, mine)
            self._let_pass(one, after[r])
            if self.compression:
                one["anchor"] = mean, ROUNDING * scale
        self.anchor = mean


def _owners(records: list[dict]) -> np.ndarray:
    """Owners' rounding errors of all buckets, one behind the other; zero before the first exchange."""
    buckets = [np.concatenate(pieces) for pieces in zip(*(one["owned"] for one in records), strict=True)]
    whole = np.concatenate(buckets).astype(np.float64)
    return whole if len(whole) else np.zeros(len(records[0]["param"]))


def mean_buffers(weights, members: list[dict]) -> dict:
    """Running statistics as those of the mixture; other numbers their mean; integers the largest."""
    result = {}
    for name, first in members[0].items():
        values = [one[name] for one in members]
        if not np.issubdtype(first.dtype, np.floating):
            result[name] = np.max(values, axis=0)
            continue
        if name.endswith("running_var"):
            means = [one[name.replace("_var", "_mean")].astype(np.float64) for one in members]
            second = weighted(weights, [var.astype(np.float64) + m * m for var, m in zip(values, means, strict=True)])
            mean = second - weighted(weights, means) ** 2
        else:
            mean = weighted(weights, values)
        scale = sum(np.abs(np.asarray(value, np.float64)) for value in values)
        result[name] = mean, ROUNDING * (scale + 1e-30)
    return result


def compare(want: dict, got: dict) -> None:
    """Values alone must be equal, bit for bit; pairs of (value, bound) may be off by the bound."""
    assert want.keys() == got.keys(), want.keys() ^ got.keys()
    for name, expected in want.items():
        if name == "buffers":
            compare(expected, got[name])
        elif isinstance(expected, tuple):
            value, bound = expected
            error = np.abs(got[name] - value)
            assert (error <= bound).all(), f"{name}: off by {error.max()}, allowed {np.max(bound)}"
        elif name == "owned":
            assert all(np.array_equal(a, b) for a, b in zip(expected, got[name], strict=True))
        else:
            np.testing.assert_array_equal(got[name], expected, err_msg=name)
