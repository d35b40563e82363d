"""How many loaders: enough, not for ever, and without going to and fro."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.data.scheduler import Elastic, ElasticLimits, LoadCounters, decide
from ephemeron.errors import JobError

LIMITS = ElasticLimits(most=64, grow_after_s=0.2, settle_s=2, calm_s=20, memory_s=300, idle_s=60)
QUIET = LoadCounters(wanted=0, waiting=0, idle=0, concurrency=1000)


def play(demand, *, limits: ElasticLimits = LIMITS, seconds: float = 600, every: float = 0.5, state: Elastic | None = None):
    """A world that needs `demand(now)` loaders: trainers wait below that, and what is above it is idle.

    Returns the targets over time and the last state.
    """
    state, now, targets = state or Elastic(), 0.0, []
    while now <= seconds:
        needed = demand(now)
        seen = LoadCounters(wanted=100 * needed, waiting=3 * (state.target < needed), idle=max(0, state.target - needed), concurrency=1000)
        state = decide(state, seen, limits, now=now)
        targets.append((now, state.target))
        now += every
    return targets, state


def changes(targets) -> list[tuple[float, int]]:
    """When the target changed, and by how much."""
    pairs = pairwise(targets)
    return [(now, after - before) for (_, before), (now, after) in pairs if after != before]


def test_the_first_loader_comes_at_once_and_all_go_when_nothing_is_wanted():
    state = decide(Elastic(), QUIET, LIMITS, now=0)
    assert state.target == 0
    state = decide(state, replace(QUIET, wanted=5), LIMITS, now=1)
    assert state.target == 1
    for now, target in ((2, 1), (30, 1), (60.9, 1), (61, 0), (1000, 0)):
        state = decide(state, replace(QUIET, idle=1), LIMITS, now=now)
        assert state.target == target


def test_growth_is_by_half_after_each_settling_and_ends_when_nobody_waits():
    targets, _ = play(lambda now: 10, seconds=100)
    grown = [target for _, target in targets[:40]]
    assert [n for i, n in enumerate(grown) if i == 0 or n != grown[i - 1]] == [1, 2, 3, 4, 6, 9, 13]
    assert targets[-1][1] == 10, "and what was too much goes"


def test_nothing_grows_for_a_moments_wait_or_past_any_limit():
    state = Elastic(target=4, changed_at=-100)
    wait = LoadCounters(wanted=100, waiting=1, idle=0, concurrency=1000)
    state = decide(state, wait, LIMITS, now=0)
    state = decide(state, replace(wait, waiting=0), LIMITS, now=0.1)
    assert decide(state, wait, LIMITS, now=0.3).target == 4
    for seen, limits, most in [
        (wait, replace(LIMITS, most=5), 5),
        (replace(wait, concurrency=5), LIMITS, 5),
        (replace(wait, wanted=5), LIMITS, 5),
        (replace(wait, idle=1), LIMITS, 4),
        (replace(wait, concurrency=2), LIMITS, 2),
        (wait, LIMITS, 6),
    ]:
        waited = replace(state, waiting_since=0.0)
        assert decide(waited, seen, limits, now=1).target == most


def test_at_least_so_many_while_there_is_work():
    limits = replace(LIMITS, least=3)
    targets, state = play(lambda now: int(now < 100), limits=limits, seconds=300)
    assert {target for now, target in targets if now < 100} == {3}
    assert state.target == 0


def test_where_shrinking_went_too_far_it_is_not_tried_again_soon():
    """Four loaders are needed, and at four one seems to be idle all the same."""
    state, targets = Elastic(target=1), []
    for now in range(1000):
        seen = LoadCounters(wanted=99, waiting=int(state.target < 4), idle=max(0, state.target - 3), concurrency=99)
        state = decide(state, seen, LIMITS, now=now)
        targets.append((now, state.target))
    late = [by for now, by in changes(targets) if now > 100]
    assert 2 <= len(late) <= 6, "once in memory_s, where calm_s would allow for fifteen times as many"


def test_every_change_restarts_the_calm():
    calm = Elastic(target=10, changed_at=-100, wanted_at=0, calm_since=0, idle=3)
    seen = LoadCounters(wanted=99, waiting=0, idle=3, concurrency=8)
    state = decide(calm, seen, LIMITS, now=15)
    assert state.target == 8, "the platform's limit holds at once"
    state = decide(state, seen, LIMITS, now=21)
    assert state.target == 8
    assert decide(state, seen, LIMITS, now=35).target == 5
    assert decide(calm, replace(seen, concurrency=99), LIMITS, now=20).target == 7


def test_mistakes_are_named():
    for wrong in ({"most": 0}, {"most": 2, "least": 3}, {"most": 2, "least": -1}):
        with pytest.raises(JobError, match="are not a range"):
            ElasticLimits(**wrong)
    with pytest.raises(JobError, match="calm_s = -1"):
        ElasticLimits(most=1, calm_s=-1)


@given(st.integers(0, 80), st.integers(0, 80))
def test_a_constant_demand_is_met_and_then_left_alone(before, demand):
    _, state = play(lambda now: before, seconds=200, every=1)
    targets, _ = play(lambda now: demand, seconds=900, every=1, state=_shifted(state, 200))
    wanted = min(demand, LIMITS.most)
    late = {target for now, target in targets if now > 700}
    assert late == {wanted}
    signs = [by > 0 for _, by in changes(targets)]
    assert sum(a != b for a, b in pairwise(signs)) <= 1, "one turn at most"


def _shifted(state: Elastic, by: float) -> Elastic:
    """The same state with the clock set back."""
    times = ("changed_at", "waiting_since", "wanted_at", "calm_since", "too_few_at")
    moved = {name: None if getattr(state, name) is None else getattr(state, name) - by for name in times}
    return replace(state, **moved)


observations = st.lists(
    st.tuples(st.floats(0, 30), st.integers(0, 50), st.integers(0, 3), st.integers(0, 20), st.integers(0, 40)), max_size=60
)


@given(observations, st.integers(0, 4))
def test_whatever_happens_changes_keep_their_distance_and_limits_hold(observations, least):
    limits = replace(LIMITS, most=30, least=least)
    state, now, last_change = Elastic(), 0.0, -1e9
    for pause, wanted, waiting, idle, concurrency in observations:
        now += pause
        seen = LoadCounters(wanted=wanted, waiting=waiting, idle=idle, concurrency=concurrency)
        before, state = state.target, decide(state, seen, limits, now=now)
        again = decide(state, seen, limits, now=now)
        assert again.target == state.target, "asking twice changes nothing"
        assert 0 <= state.target <= min(limits.most, concurrency)
        free = concurrency >= before  # the platform took nothing away
        if state.target > before and before >= max(1, least):
            assert now - last_change >= limits.settle_s
            assert waiting
            assert not idle
        if state.target < before and free and wanted:
            assert now - last_change >= limits.calm_s
            assert not waiting
            assert state.target >= max(1, least)
            assert before - state.target <= idle
        if state.target != before:
            last_change = now
