"""New plans for a run across regions while it trains, from the iteration times that its events have.

A region that would wait for the slowest one gives functions back, and gets them again when the slowest one has become faster, or it has become slower itself. Its
batches grow and shrink with that, so that an iteration has as many samples as before, and rounds stay what they are. A region
never gets more functions than it was started with.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ephemeron import blocking
from ephemeron.communication.channels.credentials import environment
from ephemeron.errors import JobError, UserError
from ephemeron.events import Event, GenerationStarted, Progress, RegionExchanged
from ephemeron.geo.scheduling.choices import Offer, RegionOffers
from ephemeron.geo.scheduling.replanning import WORTH, MeasuredIterations, fitted, replanned
from ephemeron.training.driver import lifecycle, records
from ephemeron.training.driver.group_credentials import variables_of
from ephemeron.training.driver.group_runs import members_of
from ephemeron.training.driver.records import RunRecord
from ephemeron.training.driver.result import events_of, open_run
from ephemeron.training.driver.run_dir import RunFolder
from ephemeron.training.job.generation import Generation, Resize
from ephemeron.training.worker.spec import RunSpec

LEAST, RECENT = 5, 40
"""Iterations that a measurement is of: at least, and at most the latest of them."""
_FUNCTION = "function"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningRegion:
    """A region of a running run, as its events describe it."""

    name: str
    workers: int
    """Functions now."""
    most: int
    """Functions at the start."""
    global_batch: int
    iterations: int
    usd_per_hour: float
    """Of one function."""
    measured: tuple[MeasuredIterations, ...]
    """By number of functions, the latest one last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RegionChange:
    """What a region is asked for."""

    name: str
    workers: int
    wanted: int
    """Functions from now on; as many as before: it does not change."""
    iteration_s: float
    """As measured, without waits for other regions."""
    batch_size: int
    """Of each of the wanted functions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OnlinePlan:
    """Functions of all regions from now on."""

    regions: tuple[RegionChange, ...]
    pass_before_s: float
    """Time of the whole run at the pace of now, without evaluations."""
    pass_s: float
    usd_per_hour_before: float
    usd_per_hour: float


def running_region(name: str, events: Iterable[Event], spec: RunSpec) -> RunningRegion:
    """A region from the events of its group.

    Args:
        name: of the region.
        events: of the group, with its own ranks.
        spec: of the group.

    Raises:
        JobError: its functions have batches of different sizes.
    """
    c = spec.configuration
    if c.nonaggregator_batch_size != c.batch_size and c.aggregators < c.workers:
        raise JobError(f"region {name}: functions with different batches cannot be divided anew")
    now: Generation = spec.current_generation
    done: dict[int, dict[int, float]] = {now.workers: {}}
    waited: dict[int, float] = {}
    for event in events:
        if isinstance(event, GenerationStarted):
            now = spec.resized(Resize(workers=event.workers, batch_size=event.batch_size), event.from_iteration)
            done.pop(now.workers, None)  # measured anew, and the latest
            done[now.workers] = {}
        elif isinstance(event, Progress) and event.rank == 0 and event.iteration >= now.from_iteration:
            done[now.workers].setdefault(event.iteration, event.t)
        elif isinstance(event, RegionExchanged):
            waited[event.iteration] = event.seconds
    measured = [
        MeasuredIterations(power=float(workers), samples=c.global_batch, iteration_s=seconds)
        for workers, times in done.items()
        if (seconds := _iteration_s(times, waited)) is not None
    ]
    usd = spec.prices.functions_usd(now.memory_mb / 1024 * 3600, 0)
    return RunningRegion(
        name=name, workers=now.workers, most=c.workers, global_batch=c.global_batch, iterations=spec.iterations,
        usd_per_hour=usd, measured=tuple(measured),
    )  # fmt: skip


def _iteration_s(times: dict[int, float], waited: dict[int, float]) -> float | None:
    """Mean time of the latest iterations without exchanges; None: there are too few."""
    latest = sorted(times)[-RECENT - 1 :]
    if len(latest) <= LEAST:
        return None
    begin, end = latest[0], latest[-1]
    exchanges = sum(seconds for iteration, seconds in waited.items() if begin < iteration <= end)
    return max(1e-6, times[end] - times[begin] - exchanges) / (end - begin)


def online_plan(regions: Sequence[RunningRegion], *, worth: float = WORTH) -> OnlinePlan | None:
    """Functions with which the regions go on; None: not all regions have been measured.

    The pace is what the slowest region reaches with all of its functions, and the others have the fewest that keep it.

    Args:
        regions: of the run.
        worth: least part of time or cost that a change saves.
    """
    if not all(region.measured and region.measured[-1].power == region.workers for region in regions):
        return None
    offers = [
        fitted(
            RegionOffers(
                name=r.name, offers=(Offer(kind=_FUNCTION, power=1.0, usd_per_hour=max(r.usd_per_hour, 1e-12)),),
                cores={_FUNCTION: r.most}, work=1.0,
            ),
            r.measured, samples=r.iterations * r.global_batch,
        )
        for r in regions
    ]  # fmt: skip
    found = replanned(offers, {r.name: (r.workers,) for r in regions}, promised_s=0.0, worth=worth)
    changes = []
    for region, choice in zip(regions, found.allocation.choices, strict=True):
        wanted = choice.counts[0] if region.name in found.changed else region.workers
        while region.global_batch % wanted:  # upwards: no region becomes slower than planned
            wanted += 1
        wanted = min(wanted, region.most)
        changes.append(
            RegionChange(
                name=region.name, workers=region.workers, wanted=wanted, iteration_s=region.measured[-1].iteration_s,
                batch_size=region.global_batch // wanted,
            )
        )  # fmt: skip
    after = [
        each.fixed_s + each.work / change.wanted for each, change in zip(offers, changes, strict=True)
    ]  # fmt: skip
    return OnlinePlan(
        regions=tuple(changes), pass_before_s=found.seconds_before, pass_s=max(after),
        usd_per_hour_before=sum(r.workers * r.usd_per_hour for r in regions),
        usd_per_hour=sum(change.wanted * r.usd_per_hour for r, change in zip(regions, changes, strict=True)),
    )  # fmt: skip


def replan(run_id: str, *, apply: bool) -> OnlinePlan | None:
    """A new plan for a running run; None: it has not been measured for long enough.

    Args:
        run_id: name of the run, an unambiguous beginning of it, or `last`.
        apply: ask the regions for the change.

    Raises:
        RunNotFound: there is no such run.
        UserError: it has no regions, or is not running, or its functions cannot change.
    """
    folder, _, spec = open_run(run_id)
    places = dict(zip([group.name for group in spec.configuration.groups], members_of(folder), strict=True))
    if not places:
        raise JobError(f"run {folder.run_id} has no regions", remedy=f"ephemeron resize {folder.run_id}")
    running = {
        name: _record(place) for name, place in places.items()
        if records.read_result(place) is None and place.events.exists()
    }  # fmt: skip
    if not running:
        raise UserError(f"run {folder.run_id} is not running")
    found = online_plan(
        [running_region(name, events_of(places[name]), record.run_spec()) for name, record in running.items()]
    )
    for change in () if found is None or not apply else found.regions:
        if change.wanted == change.workers:
            continue
        group = next(group for group in spec.configuration.groups if group.name == change.name)
        wanted = Resize(workers=change.wanted, batch_size=change.batch_size)
        place, record = places[change.name], running[change.name]
        with environment(variables_of(group.credentials, f"region {change.name}")):
            blocking.run(
                lambda _, place=place, record=record, wanted=wanted: lifecycle.resize(  # type: ignore[misc]
                    place, record, record.run_spec(), wanted
                )
            )
    return found


def _record(place: RunFolder) -> RunRecord:
    record = records.read_record(place)
    if record is None:
        raise UserError(f"{place.path} has no readable {records.RUN_FILE}")
    return record
