"""The cheapest or the fastest use of the devices of all regions, exactly. Pure.

All regions are billed until the slowest has finished its pass, as they wait for each other (Cloudless-Training, table 3). With a pass of T
seconds each region takes its cheapest choice of at most T seconds, independently of the others. The cost as a function of T has its minima where
T is the time of one choice of one region, so trying those is exact.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ephemeron.errors import PlanInfeasible
from ephemeron.regions.scheduling.choices import Choice, RegionOffers, choices

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
