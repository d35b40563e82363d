"""Load power and the elastic schedule of Cloudless-Training, exactly as published (section 2.2, equation 1, algorithm 1).

Every region is compared with the one that has the least load power, the straggler; from its devices each region is given those whose load power
is nearest to the straggler's. `search_optimal_plan` tries every number of every kind of device, as the paper does.

The paper does not say on which side of the straggler's load power a plan may be. Table 5 takes the nearest: 8 Skylake cores for 12 cores of
Cascade Lake have 97 % of their power by the measured column of table 1, and 9 have 110 %. So a plan may be a little slower than the straggler
was. `optimizer` never is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from ephemeron.errors import JobError

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
