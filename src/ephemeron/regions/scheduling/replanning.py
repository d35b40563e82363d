"""Plans from measured iteration times, and new plans while regions slow down or their data grow. Pure: measurements in, decisions out.

A region's time of a pass is `fixed_s + work / power` (`optimizer`). `fitted` finds both from iterations that were measured with one or more
numbers of devices. `replanned` keeps the pace that was promised as long as every region can: a region that has become slower is given more devices,
and one that has become faster gives some back. Where a region cannot keep it with all of its devices, the pace becomes that of this region,
and the others give back what they would wait with. `shares` is for regions whose functions cannot change during a run: it moves
samples instead, where samples may move.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ephemeron.regions.scheduling.optimizer import Allocation, Choice, RegionOffers, at_pace, choice_of, choices

WORTH = 0.05
"""Least part of a pass's time or cost that a change of functions saves: functions that start cost both."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredIterations:
    """Iterations of a region with one number of devices."""

    power: float
    """Of the devices that computed."""
    samples: int
    """Of one iteration."""
    iteration_s: float
    """Median time of one iteration, without waits for other regions."""


def fitted(region: RegionOffers, measured: Sequence[MeasuredIterations], *, samples: float) -> RegionOffers:
    """The region with the work and the fixed time that were measured.

    Least squares over seconds per sample, neither part negative. Measurements with one power only cannot tell the two apart: then all is work.

    Args:
        region: offers, and what is known before any measurement.
        measured: empty: the region is returned as it is.
        samples: of a pass over its data, now.
    """
    if not measured:
        return region
    inverse = [1 / each.power for each in measured]
    per_sample = [each.iteration_s / each.samples for each in measured]
    n, mean_x, mean_y = len(measured), math.fsum(inverse) / len(measured), math.fsum(per_sample) / len(measured)
    spread = math.fsum((x - mean_x) ** 2 for x in inverse)
    through_zero = math.fsum(x * y for x, y in zip(inverse, per_sample, strict=True)) / math.fsum(x * x for x in inverse)
    work, fixed = through_zero, 0.0
    if n > 1 and spread > 1e-18 * mean_x**2:
        work = math.fsum((x - mean_x) * (y - mean_y) for x, y in zip(inverse, per_sample, strict=True)) / spread
        fixed = mean_y - work * mean_x
        if fixed < 0:
            work, fixed = through_zero, 0.0
        elif work < 0:
            work, fixed = 0.0, mean_y
    return dataclasses.replace(region, work=work * samples, fixed_s=fixed * samples)


@dataclass(frozen=True, slots=True, kw_only=True)
class Replanned:
    """Decision about the functions of all regions."""

    allocation: Allocation
    changed: tuple[str, ...]
    """Names of the regions whose functions change; empty: all go on as they are."""
    seconds_before: float
    """Time of a pass if nothing changes, with what is measured now."""
    usd_before: float


def replanned(
    regions: Sequence[RegionOffers], now: Mapping[str, Sequence[int]], *, promised_s: float | None, worth: float = WORTH
) -> Replanned:
    """The allocation to go on with.

    Args:
        regions: with what is measured now (`fitted`).
        now: by region, functions of each offer that run.
        promised_s: time of a pass to keep, as planned before; None: what a pass takes now.
        worth: least part of a pass's time or cost that a change saves.
    """
    current = Allocation(regions=tuple(regions), choices=tuple(choice_of(region, now[region.name]) for region in regions))
    promised_s = current.seconds if promised_s is None else promised_s
    reachable = max(choices(region)[-1].seconds for region in regions)
    best = at_pace(regions, max(promised_s, reachable))
    late = current.seconds > max(promised_s, best.seconds) * (1 + worth)
    dear = current.usd > best.usd * (1 + worth) and best.seconds <= max(current.seconds, promised_s) * (1 + worth)
    chosen = best if late or dear else current
    changed = tuple(region.name for region, choice in zip(regions, chosen.choices, strict=True) if choice.counts != tuple(now[region.name]))
    return Replanned(allocation=chosen, changed=changed, seconds_before=current.seconds, usd_before=current.usd)


def shares(regions: Sequence[RegionOffers], now: Sequence[Choice], samples: Sequence[int]) -> tuple[float, ...]:
    """Fractions of the samples with which all regions finish a pass together, for functions that stay as they are.

    Args:
        regions: with what is measured now.
        now: functions that run.
        samples: of a pass, for each region, when that was measured.
    """
    rates = [count / choice.seconds for count, choice in zip(samples, now, strict=True)]
    return tuple(rate / math.fsum(rates) for rate in rates)
