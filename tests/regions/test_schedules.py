"""Load power, algorithm 1, and the optimiser that is never dearer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ephemeron.errors import JobError, PlanInfeasible
from ephemeron.regions.scheduling.devices import power_of
from ephemeron.regions.scheduling.optimizer import (
    Allocation,
    Choice,
    DeviceCount,
    Offer,
    RegionOffers,
    RegionResources,
    at_pace,
    cheapest,
    choice_of,
    choices,
    fastest,
    load_power,
    match_straggler,
)
from ephemeron.regions.scheduling.replanning import MeasuredIterations, fitted, replanned, shares


def region(name: str, kind: str, cores: int, data: float) -> RegionResources:
    return RegionResources(name=name, devices=(DeviceCount(kind=kind, count=cores, power=power_of(kind)),), data=data)


@pytest.mark.parametrize(
    ("first", "second", "shares", "expected"),
    [
        ("cascade-lake", "skylake", (1, 1), (12, 8)),
        ("cascade-lake", "cascade-lake", (2, 1), (12, 6)),
        ("cascade-lake", "skylake", (2, 1), (12, 4)),
    ],
)
def test_table_5(first: str, second: str, shares: tuple[float, float], expected: tuple[int, int]) -> None:
    regions = [region("shanghai", first, 12, shares[0]), region("chongqing", second, 12, shares[1])]
    planned = match_straggler(regions)
    assert tuple(each.devices[0].count for each in planned) == expected
    assert load_power(planned[0].devices, shares[0]) == load_power(regions[0].devices, shares[0]), "the straggler keeps all"


def test_equation_1_adds_all_kinds_of_devices() -> None:
    devices = (DeviceCount(kind="skylake", count=4, power=0.973), DeviceCount(kind="t4", count=1, power=119.0))
    assert load_power(devices, 2.0) == pytest.approx((4 * 0.973 + 119.0) / 2)


def test_several_kinds_of_devices_match_the_straggler() -> None:
    rich = RegionResources(
        name="rich", data=1, devices=(DeviceCount(kind="a", count=10, power=1.0), DeviceCount(kind="b", count=3, power=4.0))
    )
    _, planned = match_straggler([region("poor", "icelake", 9, 1), rich])
    assert [device.count for device in planned.devices] == [1, 2], "9 of power with the fewest devices"


def test_too_many_combinations_are_refused() -> None:
    many = RegionResources(name="many", data=1, devices=tuple(DeviceCount(kind=k, count=99, power=1.0) for k in "abcd"))
    with pytest.raises(JobError, match="region many: 100,000,000 combinations"):
        match_straggler([many, many])


def _offer(kind: str) -> st.SearchStrategy[Offer]:
    return st.builds(
        Offer,
        kind=st.just(kind),
        cores=st.sampled_from([1.0, 2.0]),
        power=st.just({"a": 0.7, "b": 1.3}[kind]),
        memory_mb=st.sampled_from([0, 500, 2000]),
        usd_per_hour=st.floats(0.01, 1.0),
    )


def _region(name: str) -> st.SearchStrategy[RegionOffers]:
    offers = st.tuples(_offer("a"), _offer("a"), _offer("b")).flatmap(lambda three: st.sampled_from([three, three[1:]]))
    return st.builds(
        RegionOffers,
        name=st.just(name),
        offers=offers,
        cores=st.fixed_dictionaries({"a": st.integers(2, 3), "b": st.integers(2, 3)}),
        work=st.floats(0.5, 5.0),
        fixed_s=st.sampled_from([0.0, 0.3]),
        memory_mb=st.sampled_from([0, 400]),
    )


def every(offers: RegionOffers) -> Iterator[Choice]:
    """All choices of a region, by trying every number of functions."""
    numbers = [
        range(int(offers.cores[o.kind] / o.cores) + 1 if not o.memory_mb or o.memory_mb >= offers.memory_mb else 1) for o in offers.offers
    ]
    for counts in itertools.product(*numbers):
        if any(counts):
            found = choice_of(offers, counts)
            if all(used <= offers.cores[kind] for kind, used in found.cores.items()):
                yield found


@settings(max_examples=25, deadline=None)
@given(_region("x"), _region("y"), st.floats(1.0, 3.0))
def test_the_optimum_is_that_of_brute_force(x: RegionOffers, y: RegionOffers, slower: float) -> None:
    pairs = [Allocation(regions=(x, y), choices=pair) for pair in itertools.product(every(x), every(y))]
    shortest = min(pair.seconds for pair in pairs)
    pace = shortest * slower
    hourly = min(sum(c.usd_per_hour for c in pair.choices) for pair in pairs if pair.seconds <= pace * (1 + 1e-12))
    assert sum(c.usd_per_hour for c in at_pace((x, y), pace).choices) == pytest.approx(hourly)
    least = min(pair.usd for pair in pairs)
    assert cheapest((x, y)).usd == pytest.approx(least)
    within = min(pair.usd for pair in pairs if pair.seconds <= pace * (1 + 1e-12))
    found = cheapest((x, y), deadline_s=pace)
    assert found.usd == pytest.approx(within)
    assert found.seconds <= pace * (1 + 1e-9)
    budget = least * slower
    assert fastest((x, y), budget_usd=budget).seconds == pytest.approx(
        min(pair.seconds for pair in pairs if pair.usd <= budget * (1 + 1e-12))
    )
    with pytest.raises(PlanInfeasible, match=r"a pass costs .* at least"):
        fastest((x, y), budget_usd=least * 0.99)
    with pytest.raises(PlanInfeasible, match="with all of its devices"):
        at_pace((x, y), shortest * 0.99)


_DEVICES = st.lists(st.tuples(st.integers(1, 8), st.floats(0.2, 5.0), st.floats(0.01, 2.0)), min_size=1, max_size=3)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(_DEVICES, st.floats(0.1, 10.0)), min_size=2, max_size=4))
def test_never_dearer_than_algorithm_1_at_its_pace(given_: list[tuple[list[tuple[int, float, float]], float]]) -> None:
    resources, offers = [], []
    for i, (devices, data) in enumerate(given_):
        kinds = [DeviceCount(kind=f"k{j}", count=n, power=p) for j, (n, p, _) in enumerate(devices)]
        resources.append(RegionResources(name=f"r{i}", devices=tuple(kinds), data=data))
        offers.append(
            RegionOffers(
                name=f"r{i}",
                work=data,
                cores={f"k{j}": n for j, (n, _, _) in enumerate(devices)},
                offers=tuple(Offer(kind=f"k{j}", power=p, usd_per_hour=usd) for j, (_, p, usd) in enumerate(devices)),
            )
        )
    matched = match_straggler(resources)
    published = Allocation(
        regions=tuple(offers),
        choices=tuple(choice_of(each, [device.count for device in plan.devices]) for each, plan in zip(offers, matched, strict=True)),
    )
    ours = at_pace(offers, published.seconds)
    assert ours.usd <= published.usd * (1 + 1e-9)
    assert ours.seconds <= published.seconds * (1 + 1e-9)


def test_functions_without_the_memory_are_left_out() -> None:
    small, large = (Offer(kind="a", power=1.0, memory_mb=mb, usd_per_hour=usd) for mb, usd in ((512, 1.0), (2048, 3.0)))
    needs = RegionOffers(name="x", offers=(small, large), cores={"a": 4}, work=1.0, memory_mb=1000)
    assert {choice.counts[0] for choice in choices(needs)} == {0}
    with pytest.raises(PlanInfeasible, match="no functions with the 4000 MB"):
        choices(RegionOffers(name="x", offers=(small, large), cores={"a": 4}, work=1.0, memory_mb=4000))
    with pytest.raises(PlanInfeasible, match="no function fits into the cores"):
        choices(RegionOffers(name="x", offers=(small,), cores={"a": 0.5}, work=1.0))


def _cores(name: str, cores: int, work: float) -> RegionOffers:
    return RegionOffers(name=name, offers=(Offer(kind="c", power=1.0, usd_per_hour=1.0),), cores={"c": cores}, work=work)


def test_work_and_fixed_time_are_those_measured() -> None:
    def took(power: float, samples: int = 64) -> MeasuredIterations:
        return MeasuredIterations(power=power, samples=samples, iteration_s=samples * (0.002 + 0.05 / power))

    before = _cores("x", 12, 1.0)
    two = fitted(before, [took(4.0), took(8.0, 32)], samples=1000)
    assert (two.work, two.fixed_s) == (pytest.approx(50.0), pytest.approx(2.0))
    one = fitted(before, [took(4.0)], samples=1000)
    assert (one.work, one.fixed_s) == (pytest.approx(4 * (0.002 + 0.05 / 4) * 1000), 0.0)
    assert fitted(before, [], samples=1000) == before
    grown = fitted(before, [took(4.0), took(8.0)], samples=2000)
    assert (grown.work, grown.fixed_s) == (pytest.approx(100.0), pytest.approx(4.0))


def test_a_fit_has_no_negative_part() -> None:
    def at(power: float, seconds: float) -> MeasuredIterations:
        return MeasuredIterations(power=power, samples=1, iteration_s=seconds)

    superlinear = fitted(_cores("x", 4, 1.0), [at(1.0, 1.0), at(2.0, 0.4)], samples=1)
    assert superlinear.fixed_s == 0.0
    assert superlinear.work > 0
    slower_with_more = fitted(_cores("x", 4, 1.0), [at(1.0, 1.0), at(2.0, 1.2)], samples=1)
    assert (slower_with_more.work, slower_with_more.fixed_s) == (0.0, pytest.approx(1.1))


def test_a_slower_region_is_given_more_and_keeps_the_pace() -> None:
    before = at_pace([_cores("x", 12, 6.0), _cores("y", 12, 12.0)], 1.0)
    assert [choice.counts for choice in before.choices] == [(6,), (12,)]
    slowed = [_cores("x", 12, 9.0), _cores("y", 12, 12.0)]
    decision = replanned(slowed, {"x": (6,), "y": (12,)}, promised_s=before.seconds)
    assert decision.changed == ("x",)
    assert decision.allocation.choices[0].counts == (9,)
    assert decision.allocation.seconds == pytest.approx(1.0)
    assert decision.seconds_before == pytest.approx(1.5)


def test_regions_that_would_wait_give_devices_back() -> None:
    slowed = [_cores("x", 12, 6.0), _cores("y", 12, 24.0)]
    decision = replanned(slowed, {"x": (6,), "y": (12,)}, promised_s=1.0)
    assert decision.changed == ("x",)
    assert decision.allocation.choices[0].counts == (3,), "y takes two seconds with all it has"
    assert decision.allocation.usd < decision.usd_before


def test_small_differences_change_nothing() -> None:
    decision = replanned([_cores("x", 12, 6.2), _cores("y", 12, 12.1)], {"x": (6,), "y": (12,)}, promised_s=1.0)
    assert decision.changed == ()
    assert decision.allocation.choices[0].counts == (6,)


def test_shares_with_which_functions_that_stay_finish_together() -> None:
    regions = [_cores("x", 12, 6.0), _cores("y", 12, 24.0)]
    now = [choice_of(each, (12,)) for each in regions]
    found = shares(regions, now, samples=[1000, 1000])
    assert found == pytest.approx((0.8, 0.2))
    seconds = [share * 2000 / 1000 * choice.seconds for share, choice in zip(found, now, strict=True)]
    assert math.isclose(*seconds)
