"""From predictions to a table: accuracy of each arm, and a bound of what it loses against synchronous Adam."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000
CONFIDENCE = 0.95
ALLOWED_POINTS = 5.0


def paired_bootstrap(
    loss: np.ndarray, groups: Sequence[str], strata: Sequence[str] | None = None, seed: int = 0
) -> np.ndarray:
    """Means of ``loss`` over clips when whole groups are drawn with replacement.

    Args:
        loss: of each clip, hits of the baseline less hits of an arm (the mean over seeds), [clips]. The pairing is in
            the difference: a draw takes both arms' predictions of a clip.
        groups: of each clip.
        strata: data set of each clip; as many groups are drawn in each as it has. Default: one.
    Returns:
        float64 [RESAMPLES]; the same for any order of clips.
    """
    keys = np.array([f"{s}\0{g}" for s, g in zip(strata or [""] * len(groups), groups, strict=True)])
    names, place = np.unique(keys, return_inverse=True)
    sums = np.bincount(place, weights=loss, minlength=len(names))
    counts = np.bincount(place, minlength=len(names))
    stratum = np.array([name.partition("\0")[0] for name in names])
    rng = np.random.default_rng(seed)
    total, clips = np.zeros(RESAMPLES), np.zeros(RESAMPLES)
    for s in np.unique(stratum):
        members = np.flatnonzero(stratum == s)
        drawn = members[rng.integers(len(members), size=(RESAMPLES, len(members)))]
        total += sums[drawn].sum(1)
        clips += counts[drawn].sum(1)
    return total / clips


def compare(hits: np.ndarray, baseline: np.ndarray, groups: Sequence[str], strata: Sequence[str]) -> dict:
    """An arm against the baseline; hits are 0 or 1, [seeds, clips], of pooled folds.

    Returns:
        accuracy and its lowest and highest seed, percent; the loss, points, with the bound that the bootstrap puts on
        it (one-sided, CONFIDENCE).
    """
    seeds = 100 * hits.mean(1)
    loss = (baseline.mean(0) - hits.mean(0)) * 100
    return {
        "accuracy": float(seeds.mean()),
        "lowest_seed": float(seeds.min()),
        "highest_seed": float(seeds.max()),
        "loss_points": float(loss.mean()),
        "bound_points": float(np.quantile(paired_bootstrap(loss, groups, strata), CONFIDENCE)),
    }


def analyse(runs: list[dict], clips: dict[str, list[tuple[str, int]]], order: Sequence[str], baseline: str) -> dict:
    """Everything that the results file says about accuracy.

    Args:
        runs: lines of the journal: data, fold, seed, arm, test (clips), predicted, cross_entropy, sent_bytes ...
        clips: of each data set, (group, label) of each clip.
        order: names of arms; those without all runs of the baseline are left out.
    Returns:
        {arm: {data set or "both": what ``compare`` returns, "sent": share of the baseline's bytes, "within": ...}}
    """
    datasets = sorted({run["data"] for run in runs})
    seeds = sorted({run["seed"] for run in runs})
    labels = {d: np.array([label for _, label in clips[d]]) for d in datasets}
    groups = [group for d in datasets for group, _ in clips[d]]
    strata = [d for d in datasets for _ in clips[d]]
    spans = {d: np.flatnonzero(np.array(strata) == d) for d in datasets}
    by_arm: dict[str, list[dict]] = {}
    for run in runs:
        by_arm.setdefault(run["arm"], []).append(run)

    def hits_of(arm: str) -> np.ndarray:
        hits = np.full((len(seeds), len(strata)), np.nan)
        for run in by_arm.get(arm, []):
            where = spans[run["data"]][run["test"]]
            hits[seeds.index(run["seed"]), where] = labels[run["data"]][run["test"]] == run["predicted"]
        return hits

    def mean_of(arm: str, key: str) -> float:
        return float(np.mean([run[key] for run in by_arm[arm]]))

    reference, result = hits_of(baseline), {}
    for arm in order:
        hits = hits_of(arm)
        if np.isnan(hits).any() or np.isnan(reference).any():
            continue
        row = {"both": compare(hits, reference, groups, strata)}
        for d in datasets if len(datasets) > 1 else ():
            at = spans[d]
            row[d] = compare(hits[:, at], reference[:, at], [groups[i] for i in at], [d] * len(at))
        row["sent"] = mean_of(arm, "sent_bytes") / mean_of(baseline, "sent_bytes")
        row["cross_entropy"], row["training_loss"] = mean_of(arm, "cross_entropy"), mean_of(arm, "loss")
        row["within"] = bool(row["both"]["bound_points"] <= ALLOWED_POINTS)
        result[arm] = row
    return result


def markdown(table: dict[str, dict], datasets: Sequence[str]) -> str:
    """The table for people, the arms in the order of the study."""
    parts = ["both", *(datasets if len(datasets) > 1 else ())]
    titles = [f"{part}: accuracy, % (seeds) | points lost | bound" for part in parts]
    head = f"| arm | sent | training loss | test loss | {' | '.join(titles)} | bound <= {ALLOWED_POINTS:g} |"
    lines = [head, "|" + " --- |" * (head.count("|") - 1)]
    for arm, row in table.items():
        cells = [
            f"{r['accuracy']:.1f} ({r['lowest_seed']:.1f} to {r['highest_seed']:.1f}) | {r['loss_points']:+.1f} | "
            f"{r['bound_points']:+.1f}"
            for r in (row[part] for part in parts)
        ]
        losses = f"{row['training_loss']:.3f} | {row['cross_entropy']:.3f}"
        verdict = "yes" if row["within"] else "no"
        lines.append(f"| {arm} | {row['sent']:.3f} | {losses} | {' | '.join(cells)} | {verdict} |")
    return "\n".join(lines) + "\n"


def figure(table: dict[str, dict], path) -> None:
    """Loss against the baseline, with the bound, one line per arm."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    names = list(table)[::-1]
    loss = np.array([table[name]["both"]["loss_points"] for name in names])
    bound = np.array([table[name]["both"]["bound_points"] for name in names])
    fig, axes = plt.subplots(figsize=(7, 1.2 + 0.27 * len(names)), layout="constrained")
    places = np.arange(len(names))
    good = bound <= ALLOWED_POINTS
    for which, colour in ((good, "tab:green"), (~good, "tab:red")):
        axes.hlines(places[which], loss[which], bound[which], color=colour, lw=3)
        axes.plot(loss[which], places[which], "o", color=colour)
    axes.axvline(0, color="grey", lw=1)
    axes.axvline(ALLOWED_POINTS, color="grey", lw=1, ls="--")
    axes.set_yticks(places, names, fontsize=8)
    axes.set_xlabel("points of accuracy lost against synchronous Adam: mean, and its 95 % upper bound")
    fig.savefig(path, dpi=120)
    plt.close(fig)
