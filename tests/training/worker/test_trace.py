"""Time of a worker by phase: no time is counted twice within a phase, and waits only where no other phase is active."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.events import PHASES
from ephemeron.training.worker.faults import FaultInjector
from ephemeron.training.worker.invocation import PhaseTrace, exclusive

spans = st.lists(
    st.tuples(st.sampled_from(PHASES), st.integers(0, 40), st.integers(1, 9)).map(lambda s: (s[0], s[1], s[1] + s[2])), max_size=25
)


def cells(parts, phase=None, *, apart_from=None):
    """The whole seconds that are covered, with repetition."""
    return sorted(s for p, a, b in parts if (p == phase if phase else p != apart_from) for s in range(int(a), int(b)))


@given(spans)
@settings(deadline=None)
def test_a_phase_never_overlaps_itself_and_loses_nothing(given_spans):
    got = exclusive(given_spans)
    for phase in PHASES:
        covered = cells(got, phase)
        assert len(covered) == len(set(covered))
        if phase != "wait":
            assert set(covered) == set(cells(given_spans, phase))


@given(spans)
@settings(deadline=None)
def test_waiting_is_what_nothing_else_covers(given_spans):
    busy = set(cells(given_spans, apart_from="wait"))
    assert set(cells(exclusive(given_spans), "wait")) == set(cells(given_spans, "wait")) - busy


@given(spans)
@settings(deadline=None)
def test_spans_are_in_order_positive_and_need_no_second_pass(given_spans):
    got = exclusive(given_spans)
    assert [s[1:] for s in got] == sorted(s[1:] for s in got)
    assert all(a < b for _, a, b in got)
    assert sorted(exclusive(got)) == sorted(got)


def test_nothing_gives_nothing():
    assert exclusive([]) == []


def test_a_trace_counts_from_the_runs_beginning_and_tells_the_injector():
    ended = []
    faults = FaultInjector(rank=0, attempt=0, die=lambda: None, fired=lambda *_: None)
    faults.ended = ended.append
    trace = PhaseTrace(100.0, faults)
    trace.record("upload", 101.0, 103.0)
    trace.record("wait", 102.0, 105.0)
    assert ended == ["upload", "wait"]
    assert trace.flush() == [("upload", 1.0, 3.0), ("wait", 3.0, 5.0)]
    assert trace.flush() == []


def test_run_time_is_loop_time_since_the_origin():
    async def now():
        loop = asyncio.get_running_loop()
        loop.time = lambda: 130.0
        return PhaseTrace(100.0, FaultInjector(rank=0, attempt=0, die=None, fired=None)).run_time()

    assert asyncio.run(now()) == 30.0
