"""Every supported pair of ParameterAverager's options against the formulas, every other one refused."""

import re
from pathlib import Path

import numpy as np
import pytest
from averaging_option_ranks import EXTRAS
from averaging_reference import Replay
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from rank_pool import on_ranks
from torch import nn

import fastactrec as far
from fastactrec.optim.averaging_options import COMPRESSION_BITS, LONGEST, AveragingOptions, PeriodSchedule

# The table's words, as options; four ranks where there is a hierarchy.
WORDS = {
    **{f'moments="{policy}"': {"moments": policy} for policy in ("local", "mean", "desloc", "reset", "frozen_v")},
    "outer step": {"outer_lr": 0.7, "outer_momentum": 0.5},
    "delay": {"delay": 2},
    "compression": {"compression": "int8"},
    "hierarchy": {"hierarchy": (2, 2)},
    "warmup": {"warmup": 2},
    "quadratic": {"quadratic": 0.0401},  # at lr 0.02: rounds of 4
    'buffers="local"': {"buffers": "local"},
}


def table() -> dict[tuple[str, str], str]:
    page = Path(__file__).resolve().parent.parent / "docs" / "averaging.md"
    chapter = page.read_text().partition("## Which options go together")[2]
    lines = [line for line in chapter.splitlines() if line.startswith("|")]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {(row[0], column): cell for row in rows[2:] for column, cell in zip(rows[0][1:], row[1:], strict=True)}


CELLS = table()
SUPPORTED = [pair for pair, cell in CELLS.items() if cell == "yes" and (pair[::-1] not in CELLS or pair < pair[::-1])]


def case(options: dict, world: int, steps: int = 14, **more) -> dict:
    samples = [[(7 * step + 3 * rank) % 5 + (rank == 0) for rank in range(world)] for step in range(steps)]
    return {"options": {"period": 3, **options}, "steps": steps, "samples": samples, **more}


def check(case: dict, results: list[dict]) -> None:
    """Against the reference after every call; all ranks the same bytes where they must be."""
    options, world, skip = dict(case["options"]), len(results), case["options"].get("warmup", 0)
    if "quadratic" in options:
        options["period"] = max(options["period"], int((options["quadratic"] / 0.02) ** 2))
    per_node, every = options.get("hierarchy", (1, 1))
    nodes = [list(range(first, first + per_node)) for first in range(0, world, per_node)]
    first = [one["calls"][skip - 1][1] if skip else one["first"] for one in results]
    replay = Replay(options, first, (nodes, every) if "hierarchy" in options else None)
    averaged = 0
    for step in range(skip, case["steps"]):
        before, after, flags = zip(*(one["calls"][step] for one in results), strict=True)
        changed = replay.step(case["samples"][step], before, after)
        assert flags == (changed,) * world
        averaged += changed
        if changed and not replay.delay:
            groups = nodes if replay.inside else [range(world)]
            for ranks in groups:
                assert len({after[rank]["param"].tobytes() for rank in ranks}) == 1
    assert averaged >= 2
    replay.all(*(list(each) for each in zip(*(one["all"] for one in results), strict=True)))
    for name, value in results[0]["state"].items():
        assert len({one["state"][name].numpy().tobytes() for one in results}) == 1, name
        assert value.isfinite().all()
    assert all(one["kept"] for one in results)
    if options.get("moments") != "reset" and not options.get("compression"):
        for one in results:  # nothing was learned between two average_all()
            assert np.abs(one["again"]["param"] - one["all"][1]["param"]).max() <= 2.0**-22


@pytest.mark.parametrize(("row", "column"), CELLS, ids=map(" and ".join, CELLS))
def test_the_table_of_combinations_is_true(row, column):
    options = {"period": 3, **WORDS[row], **WORDS[column]}
    if CELLS[row, column] == "no":
        with pytest.raises(far.InputError, match=r"^\w+ and .* do not go together: choose one$"):
            AveragingOptions(**options)
    else:
        assert CELLS[row, column] == ("-" if row == column else "yes")
        AveragingOptions(**options)
    assert CELLS.get((column, row), CELLS[row, column]) == CELLS[row, column]


def test_the_table_is_complete():
    assert {word for pair in CELLS for word in pair} == WORDS.keys()
    assert {frozenset(pair) for pair in CELLS} >= {
        frozenset((a, b)) for a in WORDS for b in WORDS if not (a.startswith("moments") and b.startswith("moments"))
    } - {frozenset(['buffers="local"'])}


@pytest.mark.parametrize(("row", "column"), SUPPORTED, ids=map(" and ".join, SUPPORTED))
def test_supported_pairs_follow_the_formulas(row, column):
    options = {"moments": "mean", **WORDS[row], **WORDS[column]}
    world = 4 if "hierarchy" in options else 2
    one = case(options, world, steps=11 if "quadratic" in options else 10)
    check(one, on_ranks(world, "averaging_option_ranks.trace", one))


@pytest.mark.parametrize("bits", COMPRESSION_BITS)
def test_compressed_means_on_three_ranks(bits):
    """Its residuals make up for exactly what the mean lacks."""
    one = case({"compression": bits, "moments": "local", "buffers": "local"}, 3, steps=9)
    check(one, on_ranks(3, "averaging_option_ranks.trace", one))


@pytest.mark.parametrize(
    "options",
    [{"hierarchy": (1, 3)}, {"hierarchy": (2, 3), "moments": "desloc"}, {"hierarchy": (4, 2)}],
    ids=str,
)
def test_hierarchies(options):
    one = case({"period": 2, **options}, 4, steps=13)
    results = on_ranks(4, "averaging_option_ranks.trace", one)
    if options["hierarchy"][0] == 4:  # one node: no levels
        one = {**one, "options": {"period": 2}}
    check(one, results)


@pytest.mark.parametrize("options", [{"moments": "mean"}, {"moments": "mean", "delay": 2}, {"compression": "int8"}])
def test_sgd(options):
    one = case(options, 2, make={"sgd": True})
    check(one, on_ranks(2, "averaging_option_ranks.trace", one))


def test_alpha_one_without_momentum_copies():
    one, other = case({"outer_lr": 1.0, "outer_momentum": 0.0}, 2), case({}, 2)
    a, b = (on_ranks(2, "averaging_option_ranks.trace", each)[0] for each in (one, other))
    assert a["all"][1]["param"].tobytes() == b["all"][1]["param"].tobytes()
    assert "anchor" not in a["first"]


SPECIAL = [{}, {"delay": 1}, {"outer_momentum": 0.3}, {"compression": "int4"}, {"compression": "bf16", "delay": 2}]


@st.composite
def cases(draw):
    steps = draw(st.integers(4, 8))
    counts = st.lists(st.sampled_from([0, 0, 1, 5, 32]), min_size=3, max_size=3)
    built = {
        "extras": tuple(draw(st.sets(st.sampled_from(EXTRAS)))),
        "width": draw(st.integers(1, 9)),
        "bucket_bytes": draw(st.sampled_from([128, 1000, 1 << 20])),
    }
    moments = draw(st.sampled_from(["local", "mean", "desloc"]))
    options = {"period": 3, "moments": moments, **draw(st.sampled_from(SPECIAL))}
    samples = draw(st.lists(counts, min_size=steps, max_size=steps))
    return {"options": options, "steps": steps, "samples": samples, "make": built}


@settings(max_examples=3, deadline=None, suppress_health_check=list(HealthCheck), phases=[Phase.generate])
@given(st.sampled_from([2, 3]), st.lists(cases(), min_size=4, max_size=4))
def test_random_models_end_equal(world, batch):
    """Tied, frozen, empty, unused, channels_last parameters, larger than a bucket; ranks without samples."""
    for one, results in zip(
        batch, zip(*on_ranks(world, "averaging_option_ranks.traces", batch), strict=True), strict=True
    ):
        replay = Replay(one["options"], [each["first"] for each in results])
        for step, counts in enumerate(one["samples"]):
            replay.step(counts, *map(list, list(zip(*(each["calls"][step] for each in results), strict=True))[:2]))
        replay.all(*(list(each) for each in zip(*(each["all"] for each in results), strict=True)))
        for name in results[0]["state"]:
            assert len({each["state"][name].numpy().tobytes() for each in results}) == 1, name


@pytest.mark.parametrize("word", WORDS)
def test_one_rank_is_left_alone(word):
    """Bit for bit, under every option."""
    from averaging_option_ranks import local_step, make

    options = {"period": 3, **WORDS[word]}
    (model, opt, avg), (plain, other, _) = make(options), make({})
    for step in range(7):
        local_step(model, opt, 0, step)
        avg.step(samples=2)
        local_step(plain, other, 0, step)
    avg.average_all()
    for a, b in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
        assert a.numpy().tobytes() == b.numpy().tobytes()
    assert (opt.read_rows() == other.read_rows()).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"period": 2, "delay": 2}, "delay=2: an averaging must end before the next begins"),
        ({"outer_lr": 0.0}, "outer_lr=0.0: give a number > 0"),
        ({"outer_lr": float("nan")}, "outer_lr=nan"),
        ({"outer_momentum": 1.0}, "outer_momentum=1.0"),
        ({"quadratic": 0.0}, "quadratic=0.0"),
        ({"compression": "fp8"}, "compression='fp8': choose from None, bf16, int8, int4"),
        ({"hierarchy": (0, 2)}, "hierarchy="),
        ({"hierarchy": "node"}, "hierarchy='node'"),
        ({"buffers": "none"}, "buffers='none'"),
        ({"warmup": -1}, "warmup=-1"),
        ({"delay": True}, "delay=True"),
    ],
    ids=str,
)
def test_values_out_of_range_are_refused(options, message):
    with pytest.raises(far.InputError, match=re.escape(message)):
        far.ParameterAverager(far.FusedAdam(far.FlatBuckets(nn.Linear(2, 2))), **options)


def test_the_quadratic_period():
    schedule = PeriodSchedule(4, 0.4)
    rising = [schedule.next_round(lr, 0.0) for lr in (0.02, 0.05, 0.1)]
    assert rising == [400, 64, 16]  # an unknown peak: the largest so far
    known = PeriodSchedule(4, 0.4)
    assert [known.next_round(lr, 0.1) for lr in (0.001, 0.05, 0.1, 0.2, 0.05)] == [16, 16, 16, 4, 64]
    assert known.next_round(0.0, 0.1) == 4
    assert known.next_round(1e-300, 0.1) == LONGEST**2  # no overflow
    resumed = PeriodSchedule(4, 0.4)
    resumed.load_state_dict(known.state_dict())
    assert resumed.next_round(0.05, 0.1) == known.next_round(0.05, 0.1) == 64
    assert PeriodSchedule(5, None).next_round(1e-9, 0.1) == 5
