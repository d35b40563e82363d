"""From regions to the cores and functions that each of them uses: `ephemeron regions plan`, and `train --regions`.

Methods: `all` takes everything, the baseline of Cloudless-Training; `match` is its algorithm 1; `cheapest` and `fastest` are exact
(`scheduling.optimizer`). Without a deadline, `cheapest` keeps the pace of algorithm 1, and so is never dearer than it. Without any price a core costs
the same everywhere. Without measured times, a pass over all data with a power of 1 takes one unit of time.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ephemeron.errors import JobError
from ephemeron.regions.region_files import Region, RegionDevice, Regions, cores_of_function, functions_of, mean_power
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
    fastest,
    load_power,
    match_straggler,
)
from ephemeron.regions.scheduling.replanning import MeasuredIterations, fitted
from ephemeron.training.job import RegionPlanMethod

DEFAULT_METHOD: RegionPlanMethod = "match"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """What a plan is asked for."""

    method: RegionPlanMethod = DEFAULT_METHOD
    deadline_s: float | None = None
    """Longest pass; None: `cheapest` keeps the pace of algorithm 1."""
    budget_usd: float | None = None
    """Highest cost of a pass, for `fastest`."""
    memory_mb: int = 0
    """Memory that a function of the job needs."""
    samples: int = 0
    """Of a pass over the data of all regions; 0: not known, so times are relative."""
    sample_s: float = 1.0
    """Seconds per sample with a power of 1, where nothing was measured."""
    measured: Mapping[str, Sequence[MeasuredIterations]] = dataclasses.field(default_factory=dict)
    """By region, what was measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedDevice:
    """Devices of one kind that a region uses."""

    kind: str
    cores: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRegion:
    """What a region uses."""

    name: str
    cores: int
    """Cores and GPUs of all kinds."""
    load_power: float
    """Equation 1, with the region's `data_share` as the size of its data."""
    available_cores: int
    available_load_power: float
    devices: tuple[PlannedDevice, ...]
    functions: tuple[int, ...]
    """Number of each size of each device, in their order."""
    seconds: float
    """Time of a pass; relative where `RegionPlan.relative`."""
    waiting_share: float
    """Part of a pass in which it waits for the slowest region."""
    usd_per_hour: float
    """Price of its devices; 0 where no price is known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionPlan:
    """Cores of all regions, beside what all cores would do."""

    method: str
    straggler: str
    """Region of the least load power with all of its devices."""
    relative: bool
    """Whether times are in no unit, as none was measured or given."""
    seconds: float
    """Time of a pass."""
    cost_usd: float | None
    """Of a pass; None: prices or times are not known."""
    saved_cost_share: float
    """Part of the cost that is saved over `all`."""
    saved_waiting_share: float
    """Part of the waiting that is saved over `all`: seconds in which cores wait."""
    seconds_with_all: float
    """Time of a pass with all cores."""
    regions: tuple[PlannedRegion, ...]

    @property
    def cores(self) -> dict[str, int]:
        """Cores by region."""
        return {region.name: region.cores for region in self.regions}


def plan_regions(regions: Regions, request: PlanRequest | None = None) -> RegionPlan:
    """The cores that each region uses.

    Raises:
        JobError: a region has no devices, or deadline and budget do not go with the method.
        PlanInfeasible: no choice keeps the deadline or the budget, or has the memory.
    """
    request = PlanRequest() if request is None else request
    _refuse_contradictions(request)
    offers = region_offers(regions, request)
    return _described(regions, request, _found(request, regions, offers))


def planned(regions: Regions, method: RegionPlanMethod | None = None) -> tuple[Regions, RegionPlanMethod | None]:
    """The regions of a run with the functions that a plan gives to those without `workers`, and its method.

    The others keep their functions, and the plan takes their power as it is. Where all have `workers`, nothing is planned: the method is None.

    Args:
        regions: as the file has them.
        method: None: the `plan` of the file; without one, `match`, or `all` where a region has no devices.

    Raises:
        JobError: a method is given and there is nothing to plan; or as `plan_regions` and `with_functions`.
        PlanInfeasible: as `plan_regions`.
    """
    free = [region.name for region in regions.region if not region.workers]
    if not free:
        if method is not None:
            raise JobError(
                f"regions.plan = '{method}' has nothing to plan: all regions have workers",
                remedy="leave regions.plan, or workers in the file, out",
            )
        return regions, None
    plannable = all(region.devices for region in regions.region)
    chosen = method or regions.plan or (DEFAULT_METHOD if plannable else "all")
    if chosen == "all" and not plannable:
        return regions, chosen
    counted = dataclasses.replace(regions, region=tuple(_as_it_is(regions, region) for region in regions.region))
    return with_functions(regions, plan_regions(counted, PlanRequest(method=chosen)), free), chosen


def _as_it_is(regions: Regions, region: Region) -> Region:
    """A region whose only choice is what its `workers` have; one without them as it is."""
    if not region.workers or not region.devices:
        return region
    power = region.workers * cores_of_function(region) * mean_power(regions, region)
    return dataclasses.replace(region, devices=(RegionDevice(kind="its workers", cores=1, power=power),))


def with_functions(regions: Regions, plan: RegionPlan, names: Sequence[str] | None = None) -> Regions:
    """The regions with `workers`, and the `memory_mb` of the size of function that is planned, as a file can have them.

    Args:
        regions: of the plan.
        plan: of `plan_regions`.
        names: regions that get them; None: all.

    Raises:
        JobError: the plan has functions of several sizes in a region.
    """
    found = []
    for region, use in zip(regions.region, plan.regions, strict=True):
        if names is None or region.name in names:
            region = _with_use(region, use)
        found.append(region)
    return dataclasses.replace(regions, region=tuple(found), plan=None)


def _with_use(region: Region, use: PlannedRegion) -> Region:
    offered = [memory_mb for device in region.devices for memory_mb in ([size.memory_mb for size in device.sizes] or [0])]
    used = [(memory_mb, n) for memory_mb, n in zip(offered, use.functions, strict=True) if n]
    sizes = {memory_mb for memory_mb, _ in used}
    if region.memory_mb or sizes == {0}:
        return dataclasses.replace(region, workers=functions_of(region, use.cores))
    if len(sizes) > 1:
        listed = ", ".join(f"{n} of {memory_mb} MB" if memory_mb else f"{n} of any" for memory_mb, n in used)
        raise JobError(
            f"region {region.name}: the plan has functions of several sizes ({listed}), and a region of a run has one",
            remedy="leave one size in its devices, or give workers and memory_mb",
        )
    return dataclasses.replace(region, workers=sum(n for _, n in used), memory_mb=used[0][0])


def _described(regions: Regions, request: PlanRequest, found: Allocation) -> RegionPlan:
    priced = _is_priced(regions)
    resources = [_resources(regions, region) for region in regions.region]
    everything = _with_all(found.regions)
    powers = [load_power(each.devices, each.data) for each in resources]
    relative = not request.samples
    hours = priced and not relative
    return RegionPlan(
        method=request.method,
        straggler=regions.names[powers.index(min(powers))],
        relative=relative,
        seconds=found.seconds,
        cost_usd=found.usd if hours else None,
        saved_cost_share=1 - found.usd / everything.usd,
        saved_waiting_share=_saved(_waiting(found), _waiting(everything)),
        seconds_with_all=everything.seconds,
        regions=tuple(
            _planned(region, each, choice, resource, waiting, priced)
            for region, each, choice, resource, waiting in zip(
                regions.region, found.regions, found.choices, resources, found.waiting_shares, strict=True
            )
        ),
    )


def region_offers(regions: Regions, request: PlanRequest) -> tuple[RegionOffers, ...]:
    """What each region offers, with the times that were measured.

    Raises:
        JobError: a region has no devices.
    """
    for region in regions.region:
        if not region.devices:
            raise JobError(f"region {region.name} has no devices to plan with", remedy="give devices = [{ kind, cores }]")
    priced = _is_priced(regions)
    return tuple(_offers(regions, region, request, priced) for region in regions.region)


def _is_priced(regions: Regions) -> bool:
    return any(
        _price(region, device) or any(size.usd_per_hour for size in device.sizes) for region in regions.region for device in region.devices
    )


def _with_all(offers: Sequence[RegionOffers]) -> Allocation:
    return Allocation(regions=tuple(offers), choices=tuple(_everything(each) for each in offers))


def _refuse_contradictions(request: PlanRequest) -> None:
    if request.budget_usd is not None and request.method != "fastest":
        raise JobError(f"a budget is not for method '{request.method}'", remedy="use method fastest")
    if request.deadline_s is not None and request.method != "cheapest":
        raise JobError(f"a deadline is not for method '{request.method}'", remedy="use method cheapest")
    if (request.budget_usd or request.deadline_s) and not request.samples:
        raise JobError("a deadline or a budget needs the time of a pass", remedy="give samples and seconds per sample")


def _found(request: PlanRequest, regions: Regions, offers: tuple[RegionOffers, ...]) -> Allocation:
    if request.method == "all":
        return _with_all(offers)
    if request.method == "fastest":
        return fastest(offers, budget_usd=math.inf if request.budget_usd is None else request.budget_usd)
    if request.deadline_s is not None:
        return cheapest(offers, deadline_s=request.deadline_s)
    matched = [{d.kind: d.count for d in each.devices} for each in match_straggler([_resources(regions, r) for r in regions.region])]
    published = Allocation(
        regions=offers, choices=tuple(choice_of(each, _smallest(each, counts)) for each, counts in zip(offers, matched, strict=True))
    )
    return published if request.method == "match" else at_pace(offers, published.seconds)


def _resources(regions: Regions, region: Region) -> RegionResources:
    return RegionResources(
        name=region.name,
        data=region.data_share,
        devices=tuple(DeviceCount(kind=d.kind, count=d.cores, power=regions.power_of(d)) for d in region.devices),
    )


def _price(region: Region, device: RegionDevice) -> float:
    return region.prices.usd_per_core_hour if device.usd_per_core_hour is None else device.usd_per_core_hour


def _offers(regions: Regions, region: Region, request: PlanRequest, priced: bool) -> RegionOffers:
    offers: list[Offer] = []
    for device in region.devices:
        power, price = regions.power_of(device), _price(region, device) if priced else 1.0
        for size in device.sizes:
            usd = size.cores * price if size.usd_per_hour is None else size.usd_per_hour
            offers.append(Offer(kind=device.kind, power=power, cores=size.cores, memory_mb=size.memory_mb, usd_per_hour=usd))
        if not device.sizes:
            offers.append(Offer(kind=device.kind, power=power, usd_per_hour=price))
    samples = regions.shares()[regions.names.index(region.name)] * (request.samples or 1)
    made = RegionOffers(
        name=region.name,
        offers=tuple(offers),
        cores={d.kind: d.cores for d in region.devices},
        memory_mb=request.memory_mb,
        work=samples * request.sample_s,
    )
    return fitted(made, request.measured.get(region.name, ()), samples=samples)


def _everything(region: RegionOffers) -> Choice:
    return choice_of(region, _smallest(region, {kind: int(cores) for kind, cores in region.cores.items()}))


def _smallest(region: RegionOffers, cores: Mapping[str, int]) -> list[int]:
    """Functions of the smallest size that the job fits into, as many as so many cores of each kind have."""
    counts = [0] * len(region.offers)
    for kind, wanted in cores.items():
        fitting = [i for i, o in enumerate(region.offers) if o.kind == kind and (not o.memory_mb or o.memory_mb >= region.memory_mb)]
        if fitting:
            smallest = min(fitting, key=lambda i: region.offers[i].cores)
            counts[smallest] = int(wanted / region.offers[smallest].cores + 1e-9)
    if not any(counts):
        raise JobError(
            f"no function of region {region.name} fits into its cores and has {region.memory_mb} MB", remedy="add a size to its devices"
        )
    return counts


def _waiting(found: Allocation) -> float:
    """Seconds of a pass in which cores wait, over all regions."""
    return math.fsum(
        waiting * found.seconds * choice.total_cores for waiting, choice in zip(found.waiting_shares, found.choices, strict=True)
    )


def _saved(now: float, before: float) -> float:
    return 1 - now / before if before else 0.0


def _planned(
    region: Region, offers: RegionOffers, choice: Choice, resource: RegionResources, waiting: float, priced: bool
) -> PlannedRegion:
    return PlannedRegion(
        name=region.name,
        cores=math.ceil(choice.total_cores - 1e-9),
        load_power=choice.power / region.data_share,
        available_cores=sum(device.count for device in resource.devices),
        available_load_power=load_power(resource.devices, resource.data),
        devices=tuple(PlannedDevice(kind=kind, cores=math.ceil(cores - 1e-9)) for kind, cores in choice.cores.items() if cores),
        functions=choice.counts,
        seconds=choice.seconds,
        waiting_share=waiting,
        usd_per_hour=choice.usd_per_hour if priced else 0.0,
    )
