"""The accuracy study: its ranks against real processes, its statistics on made-up results, and the command itself."""

import itertools
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.multiprocessing as mp

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "profiling"))

import accuracy_analysis as analysis
import accuracy_arms
import accuracy_ranks as ranks
import accuracy_runs
import lockstep

PROFILING = Path(lockstep.__file__).parent


@pytest.mark.slow
def test_lockstep_is_gloo_bit_for_bit(tmp_path):
    """Three ranks: with two, the order of additions would not matter."""
    mp.spawn(ranks.run, (3, str(tmp_path)), nprocs=3)
    real = [torch.load(tmp_path / f"rank{rank}.pt") for rank in range(3)]
    for arm in ranks.ARMS:
        ours = lockstep.Turns(3).run(lambda engine, arm=arm: ranks.train(engine, arm))
        for rank, mine in enumerate(ours):
            theirs = real[rank][arm.name]
            assert mine["sent_bytes"] == theirs["sent_bytes"] > 0
            assert mine["loss"] == theirs["loss"]
            for name, value in theirs["model"].items():
                assert torch.equal(mine["model"][name], value), f"{arm.name}: {name}"
    trained = [real[0][arm.name]["model"]["fc.1.weight"] for arm in ranks.ARMS]
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(trained, 2))


@pytest.mark.parametrize("world", [1, 3, 4])
@pytest.mark.parametrize("numel", [1, 7, 4097])
def test_sums_are_the_same_everywhere_and_right(world, numel):
    tensors = [torch.randn(numel, generator=torch.Generator().manual_seed(rank)) for rank in range(world)]
    exact = sum(tensor.double() for tensor in tensors)
    lockstep.reduce_sum(tensors)
    assert all(torch.equal(tensor, tensors[0]) for tensor in tensors)
    torch.testing.assert_close(tensors[0].double(), exact, rtol=1e-6, atol=1e-6)


def test_a_failing_rank_ends_the_others():
    def body(engine):
        if engine.rank == 1:
            raise ValueError("mine")
        engine.all_reduce(torch.ones(1)).wait()

    with pytest.raises(ValueError, match="mine"):
        lockstep.Turns(3).run(body)

    def short(engine):
        if engine.rank:
            engine.all_reduce(torch.ones(1)).wait()

    with pytest.raises(RuntimeError, match="ended before"):
        lockstep.Turns(2).run(short)

    def apart(engine):
        engine.all_reduce(torch.ones(1 + engine.rank)).wait()

    with pytest.raises(RuntimeError, match="begins all_reduce sum"):
        lockstep.Turns(2).run(apart)


def test_folds_keep_groups_together_and_sizes_even():
    groups = [f"g{i}" for i in range(11) for _ in range(1 + i)]
    folds = accuracy_runs.folds_by_group(groups, 3)
    assert sorted(itertools.chain(*folds)) == list(range(len(groups)))
    held = [{groups[i] for i in fold} for fold in folds]
    assert len(set.union(*held)) == sum(map(len, held))
    assert max(map(len, folds)) - min(map(len, folds)) <= 2


def test_bootstrap_has_the_known_bound():
    """k equal groups of which m lose every clip: the number drawn is binomial, and so is its quantile."""
    stats = pytest.importorskip("scipy.stats")
    k, m, size = 40, 8, 5
    groups = [f"g{i}" for i in range(k) for _ in range(size)]
    loss = np.repeat(np.arange(k) < m, size).astype(float)
    means = analysis.paired_bootstrap(loss, groups)
    assert means.mean() == pytest.approx(m / k, abs=3 * np.sqrt(0.2 * 0.8 / k / analysis.RESAMPLES))
    assert np.quantile(means, 0.95) == pytest.approx(stats.binom.ppf(0.95, k, m / k) / k, abs=1e-9)
    # by clips instead of groups the bound would be far too low
    assert np.quantile(analysis.paired_bootstrap(loss, [str(i) for i in range(k * size)]), 0.95) < 0.26


def test_bootstrap_of_equal_losses_does_not_spread():
    groups = ["a", "a", "b", "c", "c", "c"]
    assert np.unique(analysis.paired_bootstrap(np.full(6, 0.25), groups)) == [0.25]


def test_bootstrap_keeps_the_size_of_each_stratum():
    """All losses in one data set of one group: however groups are drawn, it is drawn once."""
    loss, groups, strata = np.array([1.0, 0, 0, 0]), ["a", "b", "c", "d"], ["x", "y", "y", "y"]
    assert np.unique(analysis.paired_bootstrap(loss, groups, strata)) == [0.25]
    assert len(np.unique(analysis.paired_bootstrap(loss, groups))) > 2


def test_the_order_of_clips_does_not_matter():
    rng = np.random.default_rng(3)
    groups = rng.integers(9, size=60).astype(str)
    loss = rng.integers(-3, 4, size=60) / 3
    order = rng.permutation(60)
    first = analysis.paired_bootstrap(loss, list(groups))
    again = analysis.paired_bootstrap(loss[order], list(groups[order]))
    np.testing.assert_allclose(first, again, atol=1e-12)


def test_analysis_pools_folds_and_seeds():
    clips = {"d": [("a", 0), ("a", 1), ("b", 0), ("b", 1)]}

    def run(arm, seed, fold, predicted, sent):
        test = [0, 1] if fold == 0 else [3, 2]
        return {
            "data": "d", "arm": arm, "seed": seed, "fold": fold, "test": test, "predicted": predicted,
            "sent_bytes": sent, "cross_entropy": 1.0, "loss": 1.0,
        }  # fmt: skip

    right = [[0, 1], [1, 0]]
    runs = [run("base", seed, fold, right[fold], 8) for seed in (0, 1) for fold in (0, 1)]
    runs += [run("arm", seed, 0, right[0], 2) for seed in (0, 1)]
    runs += [run("arm", 0, 1, [0, 0], 2), run("arm", 1, 1, right[1], 2)]  # clip 3 missed by seed 0
    runs += [run("unfinished", 0, 0, right[0], 2)]
    table = analysis.analyse(runs, clips, ["base", "arm", "unfinished"], "base")
    assert list(table) == ["base", "arm"]
    row = table["arm"]["both"]
    assert (row["accuracy"], row["lowest_seed"], row["highest_seed"]) == (87.5, 75.0, 100.0)
    assert row["loss_points"] == 12.5
    assert row["bound_points"] == 25.0  # b drawn twice, a quarter of the draws
    assert table["arm"]["sent"] == 0.25
    assert not table["arm"]["within"]
    assert table["base"]["both"]["bound_points"] == 0
    assert table["base"]["within"]
    assert "| arm | 0.250 | 1.000 | 1.000 | 87.5 (75.0 to 100.0) | +12.5 | +25.0 | no |" in analysis.markdown(
        table, ["d"]
    )


def test_names_of_arms_are_unique_and_default_is_part_of_full():
    short, full = ([arm.name for arm in accuracy_arms.arms(f)] for f in (False, True))
    assert len(set(full)) == len(full)
    assert full[: len(short)] == short


@pytest.mark.slow
def test_command_on_a_synthetic_pack(launch, tmp_path):
    """Two arms, one seed; then again, which must find everything done."""
    from fastactrec.data.synthetic import make_synthetic

    make_synthetic(tmp_path / "videos", clips_per_class_train=4, clips_per_class_test=0, seed=0, frames=8)
    pack = tmp_path / "packs" / "synthetic"
    source = tmp_path / "videos"
    made = launch("-m", "fastactrec.prepare", source, "--out", pack, "--size", "short:64", "--bound-px", 10)
    assert made.returncode == 0, made.stderr
    words = (
        PROFILING / "accuracy.py", "--packs", tmp_path / "packs", "--only", "synthetic", "--out", tmp_path / "results",
        "--name", "here", "--arms", "sync;K=2 desloc", "--seeds", 1, "--epochs", 1, "--passes", 1, "--folds", 2,
        "--workers", 1,
    )  # fmt: skip
    done = launch(*words)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "results" / "accuracy-here.json").read_text())
    assert set(result["arms"]) == {"sync", "K=2 desloc"}
    assert result["data"]["synthetic"]["groups"] > 1
    assert (tmp_path / "results" / "accuracy-here.png").stat().st_size > 5000
    journal = tmp_path / "packs" / "accuracy.jsonl"
    lines = journal.read_text()
    journal.write_text(lines + '{"half')  # killed while writing
    again = launch(*words)
    assert again.returncode == 0, again.stderr
    assert "1/1" not in again.stdout
    assert journal.read_text() == lines
