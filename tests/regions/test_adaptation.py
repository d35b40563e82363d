"""Rounds that follow the link: what is chosen for a link, and that all regions agree on when parts are sent and applied."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ephemeron.errors import JobError
from ephemeron.regions.policies import (
    Adaptation,
    AdaptiveSchedule,
    Due,
    Measured,
    adapted,
    checked_sync,
    first_plans,
    next_plan,
    parse_sync,
    slowest,
)
from ephemeron.regions.policies.schedule import COMPRESSIONS, PARTS, SHARE


def links(bandwidth: st.SearchStrategy[float] | None = None) -> st.SearchStrategy[Measured]:
    return st.builds(Measured, iteration_s=st.floats(1e-3, 10), bandwidth=bandwidth or st.floats(1e3, 1e10), round_trip_s=st.floats(0, 1))


@given(links(), st.integers(1_000, 10**9), st.integers(1, 500))
def test_the_staleness_limit_holds_and_the_link_is_not_used_beyond_its_share(measured: Measured, nbytes: int, limit: int) -> None:
    how = adapted(measured, nbytes=nbytes, limit=limit)
    assert how.every + how.delay <= limit
    assert how.delay < how.every
    assert how.compression in COMPRESSIONS
    strongest = list(COMPRESSIONS)[-1]
    if how != Adaptation(every=limit, compression=strongest, fragments=1, delay=0):
        seconds = nbytes * COMPRESSIONS[how.compression] / 4 / measured.bandwidth
        assert seconds <= SHARE * how.every * measured.iteration_s * (1 + 1e-6)


@given(links(), st.floats(1, 1000), st.integers(1_000, 10**8), st.integers(20, 500))
def test_a_slower_link_never_has_more_bytes_an_iteration(measured: Measured, factor: float, nbytes: int, limit: int) -> None:
    slow = Measured(iteration_s=measured.iteration_s, bandwidth=measured.bandwidth / factor, round_trip_s=measured.round_trip_s)

    def rate(how: Adaptation) -> float:
        return COMPRESSIONS[how.compression] / how.every

    fast, slower = (adapted(each, nbytes=nbytes, limit=limit) for each in (measured, slow))
    assert rate(slower) <= rate(fast) * (1 + 1e-9)
    assert list(COMPRESSIONS).index(slower.compression) >= list(COMPRESSIONS).index(fast.compression)


def test_links_from_a_data_centre_to_a_telephone_line() -> None:
    model = 600_000
    found = [
        adapted(Measured(iteration_s=0.05, bandwidth=mbit * 1e6 / 8, round_trip_s=0.03), nbytes=model, limit=64)
        for mbit in (10_000, 100, 3, 0.7, 0.3, 0.001)
    ]
    assert [how.compression for how in found] == ["none", "none", "int8", "int4", "topk2:0.05", "topk2:0.05"]
    assert found[0] == Adaptation(every=8, compression="none", fragments=4, delay=2)
    assert found[-1] == Adaptation(every=64, compression="topk2:0.05", fragments=1, delay=0)


def test_the_slowest_region_and_link_count() -> None:
    near, far = Measured(iteration_s=1, bandwidth=9), Measured(iteration_s=2, bandwidth=3, round_trip_s=0.5)
    assert slowest([near, far]) == Measured(iteration_s=2, bandwidth=3, round_trip_s=0.5)
    assert slowest([]) is None


@st.composite
def schedules(draw: st.DrawFn) -> tuple[AdaptiveSchedule, AdaptiveSchedule]:
    """Of the first region and of another one, with all rounds of the run."""
    reference, other = draw(st.integers(1, 300)), draw(st.integers(1, 300))
    first = Adaptation(every=draw(st.integers(1, 40)), compression="none", fragments=1, delay=0)
    least = math.ceil(reference / min(reference, other))
    plans = first_plans(Adaptation(every=max(first.every, least), compression="none", fragments=1, delay=0), reference=reference)
    while True:
        every = draw(st.integers(1, 40))
        wanted = Adaptation(
            every=every, compression="int4", fragments=draw(st.sampled_from([1, 2, 4])), delay=draw(st.integers(0, every - 1))
        )
        plan = next_plan(plans[-1], wanted, reference=reference, least=least)
        if plan is None:
            break
        plans.append(plan)
    own, theirs = (AdaptiveSchedule(iterations=n, reference=reference, plans=plans) for n in (reference, other))
    return own, theirs


@given(schedules())
def test_parts_of_all_rounds_are_sent_once_and_applied_before_they_are_sent_again(pair: tuple[AdaptiveSchedule, AdaptiveSchedule]) -> None:
    for schedule in pair:
        sent: list[Due] = []
        applied: list[Due] = []
        for iteration in range(1, schedule.iterations + 1):
            applies = schedule.applies(iteration)
            assert schedule.is_due(iteration) or not (applies or schedule.sends(iteration))
            applied += [due for due in applies if schedule.sent_before(due) < iteration]
            for due in schedule.sends(iteration):
                assert due.round == 1 or Due(due.fragment, due.round - 1) in applied
                sent.append(due)
            applied += [due for due in applies if schedule.sent_before(due) == iteration]
            assert set(applied) <= set(sent)
        wanted = [Due(part, number) for part in range(PARTS) for number in range(1, schedule.last + 1)]
        assert sorted(sent) == sorted(applied) == wanted
        for part in range(PARTS):
            assert [due.round for due in applied if due.fragment == part] == list(range(1, schedule.last + 1))


@given(schedules())
def test_a_plan_is_known_before_its_round_begins(pair: tuple[AdaptiveSchedule, AdaptiveSchedule]) -> None:
    """A plan comes with the first part of the round two before."""
    for schedule in pair:
        for number in range(3, schedule.last + 1):
            known = schedule.applied_before(Due(0, number - 2))
            assert known <= min(schedule.sent_before(Due(part, number)) for part in range(PARTS))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("diloco:auto,fragments=2", "'fragments' is no option of diloco"),
        ("sma:auto", "'auto' is no option of sma"),
        ("auto:limit=x", "is no number"),
    ],
)
def test_options_that_contradict_adaptation_are_refused(text: str, said: str) -> None:
    with pytest.raises(JobError, match=said):
        checked_sync(text, "none", 10)


def test_names_of_adaptation() -> None:
    assert parse_sync("auto") == parse_sync("diloco:auto")
    assert parse_sync("auto:limit=100,momentum=0.5").limit == 100
