"""The cheapest or the fastest use of the devices of all regions, exactly. Pure.

All regions are billed until the slowest has finished its pass, as they wait for each other (Cloudless-Training, table 3). With a pass of T
seconds each region takes its cheapest choice of at most T seconds, independently of the others. The cost as a function of T has its minima where
T is the time of one choice of one region, so trying those is exact.

Load power and the elastic schedule of Cloudless-Training, exactly as published (section 2.2, equation 1, algorithm 1).

Every region is compared with the one that has the least load power, the straggler; from its devices each region is given those whose load power
is nearest to the straggler's. `search_optimal_plan` tries every number of every kind of device, as the paper does.

The paper does not say on which side of the straggler's load power a plan may be. Table 5 takes the nearest: 8 Skylake cores for 12 cores of
Cascade Lake have 97 % of their power by the measured column of table 1, and 9 have 110 %. So a plan may be a little slower than the straggler
was. `optimizer` never is.

Everything that a region can run a job on, as a Pareto front of speed and price. Pure.

A region offers functions of several sizes: cores, memory and price of one function on one kind of device. The sizes of a kind share the cores
of that kind. A pass over the region's data takes

    seconds = fixed_s + work / power

where `power` is the sum over the functions, and `fixed_s` what more functions do not shorten, such as the exchange within the region. Both are
fitted to measured iteration times (`replanning.fitted`). Left out: the exchange within a region takes longer with more functions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from ephemeron.errors import JobError, PlanInfeasible

_SLACK = 1 + 1e-12
"""Of rounding, when two times are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """One choice for each region."""

    regions: tuple[RegionOffers, ...]
    choices: tuple[Choice, ...]

    @property
    def seconds(self) -> float:
        """Time of a pass of all regions: that of the slowest."""
        return max(choice.seconds for choice in self.choices)

    @property
    def usd(self) -> float:
        """Cost of a pass: every region is billed until the slowest has finished."""
        return math.fsum(choice.usd_per_hour for choice in self.choices) * self.seconds / 3600

    @property
    def waiting_shares(self) -> tuple[float, ...]:
        """For each region, the part of a pass in which it waits for the slowest."""
        return tuple(1 - choice.seconds / self.seconds for choice in self.choices)


def at_pace(regions: Sequence[RegionOffers], seconds: float) -> Allocation:
    """The cheapest allocation whose pass takes at most so long.

    Raises:
        PlanInfeasible: a region cannot keep the pace; names it and its shortest time.
    """
    return _at_pace(regions, [choices(region) for region in regions], seconds)


def cheapest(regions: Sequence[RegionOffers], *, deadline_s: float = math.inf) -> Allocation:
    """The cheapest allocation of all whose pass takes at most `deadline_s`; of equally cheap ones, the fastest.

    Raises:
        PlanInfeasible: a region cannot keep the deadline.
    """
    fronts = [choices(region) for region in regions]
    _at_pace(regions, fronts, deadline_s)
    within = (found for found in _candidates(regions, fronts) if found.seconds <= deadline_s * _SLACK)
    return min(within, key=lambda found: (found.usd, found.seconds))


def fastest(regions: Sequence[RegionOffers], *, budget_usd: float = math.inf) -> Allocation:
    """The allocation of the shortest pass that costs at most `budget_usd`; of equally fast ones, the cheapest.

    Raises:
        PlanInfeasible: every allocation costs more; names the least cost.
    """
    fronts = [choices(region) for region in regions]
    least = math.inf
    for found in _candidates(regions, fronts):
        if found.usd <= budget_usd * _SLACK:
            return found
        least = min(least, found.usd)
    raise PlanInfeasible(f"a pass costs ${least:.6g} at least, and the budget is ${budget_usd:.6g}", binding="budget_usd")


def _candidates(regions: Sequence[RegionOffers], fronts: Sequence[Sequence[Choice]]) -> Iterator[Allocation]:
    """The cheapest allocation for each time that a choice of a region takes, from the shortest possible pass on."""
    shortest = max(front[-1].seconds for front in fronts)
    for seconds in sorted({choice.seconds for front in fronts for choice in front if choice.seconds >= shortest}):
        yield _at_pace(regions, fronts, seconds)


def _at_pace(regions: Sequence[RegionOffers], fronts: Sequence[Sequence[Choice]], seconds: float) -> Allocation:
    taken = []
    for region, front in zip(regions, fronts, strict=True):
        found = next((choice for choice in front if choice.seconds <= seconds * _SLACK), None)
        if found is None:
            raise PlanInfeasible(
                f"region {region.name} needs {front[-1].seconds:.6g} s for a pass with all of its devices, and {seconds:.6g} s are given",
                binding=f"region {region.name}",
            )
        taken.append(found)
    return Allocation(regions=tuple(regions), choices=tuple(taken))


# -- load power and the elastic schedule of Cloudless-Training ----------------------------------------------------


MOST_PLANS = 5_000_000
"""Combinations of device numbers that `search_optimal_plan` tries in a region."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceCount:
    """Devices of one kind."""

    kind: str
    count: int
    """CPU cores, or GPUs (N of equation 1)."""
    power: float
    """Speed of one of them (P of equation 1)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionResources:
    """Devices of a region, and the data that they train on."""

    name: str
    devices: tuple[DeviceCount, ...]
    data: float
    """Size of its training set, in any unit that all regions share (S_data of equation 1)."""


def load_power(devices: Sequence[DeviceCount], data: float) -> float:
    """Equation 1: speed of all devices for each unit of data. Both sums, of CPUs and of GPUs, are one here."""
    return math.fsum(device.count * device.power for device in devices) / data


def match_straggler(regions: Sequence[RegionResources]) -> tuple[RegionResources, ...]:
    """Algorithm 1: for each region the devices that match the region of the least load power.

    Returns:
        The regions in their order, with the devices to use; the straggler keeps all of its devices.

    Raises:
        JobError: a region has too many combinations of devices to try.
    """
    least = min(load_power(region.devices, region.data) for region in regions)
    return tuple(search_optimal_plan(region, least) for region in regions)


def search_optimal_plan(region: RegionResources, wanted: float) -> RegionResources:
    """The devices of a region whose load power is nearest to the wanted one; of several, the fewest.

    Raises:
        JobError: there are too many combinations to try.
    """
    tried = math.prod(device.count + 1 for device in region.devices)
    if tried > MOST_PLANS:
        raise JobError(
            f"region {region.name}: {tried:,} combinations of devices are too many to try one by one",
            remedy="use method cheapest, which need not",
        )
    powers = [device.power for device in region.devices]

    def distance(counts: Sequence[int]) -> tuple[float, int]:
        found = math.fsum(map(math.prod, zip(counts, powers, strict=True))) / region.data
        return round(abs(found - wanted), 12), sum(counts)

    every = itertools.product(*(range(device.count + 1) for device in region.devices))
    best = min((counts for counts in every if any(counts)), key=distance)
    return RegionResources(
        name=region.name,
        data=region.data,
        devices=tuple(DeviceCount(kind=d.kind, count=n, power=d.power) for d, n in zip(region.devices, best, strict=True)),
    )


# -- everything that a region can run a job on --------------------------------------------------------------------


_DIGITS = 9
"""Of cores, when two sums of them are compared."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offer:
    """Functions of one size on one kind of device."""

    kind: str
    cores: float = 1.0
    """Cores of one function."""
    power: float
    """Speed of one core."""
    memory_mb: int = 0
    """Memory of one function; 0: not limited."""
    usd_per_hour: float
    """Price of one function."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionOffers:
    """What a region offers for a job."""

    name: str
    offers: tuple[Offer, ...]
    cores: Mapping[str, float]
    """By kind, cores that there are."""
    work: float
    """Seconds of a pass over its data with a power of 1."""
    fixed_s: float = 0.0
    """Seconds of a pass that no power shortens."""
    memory_mb: int = 0
    """Memory that a function of the job needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """Functions that a region uses."""

    counts: tuple[int, ...]
    """For each offer, functions."""
    power: float
    usd_per_hour: float
    seconds: float
    """Of a pass over the region's data."""
    cores: Mapping[str, float] = field(default_factory=dict)
    """By kind, cores in use."""

    @property
    def total_cores(self) -> float:
        """Cores in use."""
        return sum(self.cores.values())


def choices(region: RegionOffers) -> tuple[Choice, ...]:
    """All choices of a region to which no other is both at least as fast and as cheap, from the slowest to the fastest.

    Raises:
        PlanInfeasible: no function of the region has the memory that the job needs, or none fits into its cores.
    """
    usable = [i for i, offer in enumerate(region.offers) if not offer.memory_mb or offer.memory_mb >= region.memory_mb]
    if not usable:
        raise PlanInfeasible(
            f"region {region.name} has no functions with the {region.memory_mb} MB that the job needs", binding="memory_mb"
        )
    points: list[tuple[float, float, dict[int, int]]] = [(0.0, 0.0, {})]
    for kind in dict.fromkeys(region.offers[i].kind for i in usable):
        own = _of_kind(region, kind, [i for i in usable if region.offers[i].kind == kind])
        points = _front([(p + q, c + d, n | m) for p, c, n in points for q, d, m in own])
    found = [choice_of(region, [counts.get(i, 0) for i in range(len(region.offers))]) for _, _, counts in points if counts]
    if not found:
        raise PlanInfeasible(f"no function fits into the cores of region {region.name}", binding="cores")
    return tuple(found)


def _of_kind(region: RegionOffers, kind: str, offers: Sequence[int]) -> list[tuple[float, float, dict[int, int]]]:
    """Power, price and numbers of all that fits into the cores of a kind, each sum of cores at its least price."""
    limit = region.cores.get(kind, 0.0)
    cheapest: dict[float, tuple[float, dict[int, int]]] = {0.0: (0.0, {})}
    for i in offers:
        offer, before = region.offers[i], dict(cheapest)
        for used, (usd, counts) in before.items():
            for n in range(1, int((limit - used) / offer.cores + 1e-9) + 1):
                total, price = round(used + n * offer.cores, _DIGITS), usd + n * offer.usd_per_hour
                if total not in cheapest or price < cheapest[total][0]:
                    cheapest[total] = (price, counts | {i: n})
    power = region.offers[offers[0]].power
    return _front([(cores * power, usd, counts) for cores, (usd, counts) in cheapest.items()])


def _front(points: list[tuple[float, float, dict[int, int]]]) -> list[tuple[float, float, dict[int, int]]]:
    """The points that no other is at least as good as, by power."""
    points.sort(key=lambda point: (-point[0], point[1]))
    kept: list[tuple[float, float, dict[int, int]]] = []
    for point in points:
        if not kept or point[1] < kept[-1][1]:
            kept.append(point)
    return kept[::-1]


def choice_of(region: RegionOffers, counts: Sequence[int]) -> Choice:
    """The choice of so many functions of each offer."""
    cores: dict[str, float] = {}
    for offer, n in zip(region.offers, counts, strict=True):
        cores[offer.kind] = cores.get(offer.kind, 0.0) + n * offer.cores
    power = sum(n * offer.cores * offer.power for offer, n in zip(region.offers, counts, strict=True))
    return Choice(
        counts=tuple(counts),
        power=power,
        cores=cores,
        usd_per_hour=sum(n * offer.usd_per_hour for offer, n in zip(region.offers, counts, strict=True)),
        seconds=region.fixed_s + region.work / power,
    )
