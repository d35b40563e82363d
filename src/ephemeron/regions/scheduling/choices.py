"""Everything that a region can run a job on, as a Pareto front of speed and price. Pure.

A region offers functions of several sizes: cores, memory and price of one function on one kind of device. The sizes of a kind share the cores
of that kind. A pass over the region's data takes

    seconds = fixed_s + work / power

where `power` is the sum over the functions, and `fixed_s` what more functions do not shorten, such as the exchange within the region. Both are
fitted to measured iteration times (`replanning.fitted`). Left out: the exchange within a region takes longer with more functions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ephemeron.errors import PlanInfeasible

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
