"""Phases: what is recorded, under nesting, exceptions and threads, and which NVTX ranges a profiler sees."""

import itertools
import threading

import nvtx
import pytest

from fastactrec.phases import COLORS, COMMUNICATION, COMPUTE, DATA, DOMAIN, PhaseRecorder


def recorder_with_ticks():
    """A recorder whose clock advances by one second per reading."""
    return PhaseRecorder(clock=itertools.count(1.0).__next__)


def test_records_start_and_end():
    recorder = recorder_with_ticks()
    with recorder.phase("forward"):
        pass
    with recorder.phase("backward"), recorder.phase("averaging"):
        pass
    assert recorder.intervals("forward").tolist() == [[1.0, 2.0]]
    assert recorder.intervals("averaging").tolist() == [[4.0, 5.0]]
    assert recorder.intervals("backward").tolist() == [[3.0, 6.0]]
    assert recorder.totals() == {"forward": 1.0, "backward": 3.0, "averaging": 1.0}
    assert recorder.intervals("data").shape == (0, 2)


def test_reset_and_add():
    recorder = recorder_with_ticks()
    recorder.add("averaging", 2.0, 2.5)
    recorder.add("averaging", 3.0, 4.0)
    assert recorder.totals() == {"averaging": 1.5}
    recorder.reset()
    assert recorder.totals() == {}


def test_an_exception_is_counted_and_passes():
    recorder = recorder_with_ticks()
    with pytest.raises(RuntimeError, match="boom"), recorder.phase("data"):
        raise RuntimeError("boom")
    assert recorder.totals() == {"data": 1.0}


@pytest.mark.parametrize("call", [lambda r: r.phase("foward"), lambda r: r.add("foward", 0, 1)])
def test_unknown_phase_is_refused(call):
    with pytest.raises(ValueError, match="'foward' is not a phase"):
        call(PhaseRecorder())


def test_synchronize_runs_before_both_readings():
    calls = []
    recorder = PhaseRecorder(synchronize=lambda: calls.append("sync"), clock=lambda: calls.append("read") or 0.0)
    with recorder.phase("forward"):
        calls.append("body")
    assert calls == ["sync", "read", "body", "sync", "read"]


def test_threads_do_not_lose_phases():
    recorder = PhaseRecorder()

    def work():
        for _ in range(200):
            with recorder.phase("decode"):
                pass

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    spans = recorder.intervals("decode")
    assert spans.shape == (800, 2)
    assert (spans[:, 1] >= spans[:, 0]).all()


def test_nvtx_ranges_have_the_domain_and_category(monkeypatch):
    seen = []

    class Domain:
        def get_event_attributes(self, message, category, color):
            return message, category

        def push_range(self, attributes):
            seen.append(("push", *attributes))

        def pop_range(self):
            seen.append(("pop",))

    monkeypatch.setattr(nvtx, "get_domain", lambda name: seen.append(("domain", name)) or Domain())
    recorder = PhaseRecorder()
    with recorder.phase("h2d"):
        pass
    assert seen == [("domain", DOMAIN), ("push", "h2d", "h2d"), ("pop",)]


def test_kinds_are_phases():
    assert {*COMPUTE, *COMMUNICATION, *DATA} <= set(COLORS)
