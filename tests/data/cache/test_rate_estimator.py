from __future__ import annotations

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.data.cache import RateEstimator
from ephemeron.data.cache.access_forecast import RateState, assumed_rate


@given(st.floats(0.01, 1000), st.integers(1, 64), st.integers(2, 40))
def test_batches_at_one_instant_do_not_bend_the_rate(rate, batch, batches) -> None:
    pace = RateEstimator()
    for n in range(batches):
        for _ in range(batch):
            pace.observe(n * batch / rate)
    assert pace.samples_per_s == pytest.approx(rate)


def test_one_instant_tells_no_rate_and_others_stand_in() -> None:
    new, slow, fast = RateEstimator(), RateEstimator(), RateEstimator()
    new.observe(5.0)
    for pace, step_s in ((slow, 1.0), (fast, 0.25)):
        pace.observe(0.0)
        pace.observe(step_s)
    assert new.samples_per_s is None
    assert assumed_rate(new, [new, slow, fast]) == 2.5
    assert assumed_rate(new, [new]) == 1.0
    assert assumed_rate(fast, [new, slow, fast]) == 4.0


def test_it_forgets() -> None:
    pace = RateEstimator(memory=10)
    for n in range(100):
        pace.observe(float(n))
    for n in range(100):
        pace.observe(99 + (n + 1) / 4)
    assert pace.samples_per_s == pytest.approx(4.0, rel=0.01)


def test_a_clock_that_runs_backwards_stands_still() -> None:
    pace = RateEstimator()
    for now_s in (0.0, 2.0, 1.0, 2.0, 4.0):
        pace.observe(now_s)
    assert pace.last_s == 4.0
    assert pace.samples_per_s == pytest.approx(1.0, rel=0.01)


@given(st.lists(st.floats(0, 100), max_size=20))
def test_the_state_is_everything(times) -> None:
    pace = RateEstimator()
    for now_s in sorted(times):
        pace.observe(now_s, 3)
    copy = RateEstimator.from_state(RateState(**json.loads(json.dumps(asdict(pace.state())))))
    for one in (pace, copy):
        one.observe(200.0)
    assert copy.state() == pace.state()
    assert copy.samples_per_s == pace.samples_per_s
