"""New plans for a run across regions while it trains, from the iteration times that its events have.

A region that would wait for the slowest one gives functions back, and gets them again when the slowest one has become faster, or it has become slower itself.
A region that has become slower than it was at first is given more functions, as many as its devices have cores for. Its batches
grow and shrink with that, so that an iteration has as many samples as before, and rounds stay what they are.

The pace to keep is that of the beginning, or the one that all regions would have now with the functions that they began with, if that is
faster. More functions than these are for keeping the pace, not for a better one: how many a run begins with is for the plan before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from ephemeron import blocking
from ephemeron.communication.channels.credentials import environment
from ephemeron.errors import JobError, UserError
from ephemeron.events import Event, GenerationStarted, Progress, RegionExchanged
from ephemeron.regions.driver.network_options import variables_of
from ephemeron.regions.driver.region_events import members_of
from ephemeron.regions.scheduling.optimizer import Offer, RegionOffers
from ephemeron.regions.scheduling.replanning import WORTH, MeasuredIterations, fitted, replanned
from ephemeron.runs.folders import RUN_FILE, RunFolder, events_of
from ephemeron.runs.header import RunHeader, read_header
from ephemeron.training.driver import lifecycle, records
from ephemeron.training.driver.records import run_spec
from ephemeron.training.driver.result import open_run
from ephemeron.training.job.generation import Generation, Resize
from ephemeron.training.worker.spec import RunSpec

LEAST, RECENT = 5, 20
"""Iterations that a measurement is of: at least, and at most the latest of them."""
FIRST = 3
"""Iterations of a generation that are slower than the others, as functions have just started."""
_FUNCTION = "function"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningRegion:
    """A region of a running run, as its events describe it."""

    name: str
    workers: int
    """Functions now."""
    most: int
    """Functions that it may have."""
    global_batch: int
    iterations: int
    usd_per_hour: float
    """Of one function."""
    measured: tuple[MeasuredIterations, ...]
    """By number of functions, the latest one last."""
    begun_with: int = 0
    """Functions at the start; 0: as many as it may have."""
    first_iteration_s: float = 0.0
    """Time of an iteration at the start; 0: not known."""


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


class RegionMeasurement:
    """Iteration times of a region, from the events of its group.

    What more functions are worth is seen where their number changes: from iterations just before and just after that. The times of now then
    say how fast the region is, so that one that has become slower meanwhile is not taken for one in which functions do not help.

    Args:
        name: of the region.
        spec: of its group.
        most: functions that it may have; 0: as many as at the start.

    Raises:
        JobError: its functions have batches of different sizes.
    """

    def __init__(self, name: str, spec: RunSpec, *, most: int = 0) -> None:
        c = spec.configuration
        if c.nonaggregator_batch_size != c.batch_size and c.aggregators < c.workers:
            raise JobError(f"region {name}: functions with different batches cannot be divided anew")
        self._name, self._spec, self._most = name, spec, max(most, c.workers)
        self._now: Generation = spec.current_generation
        self._times: dict[int, float] = {}
        """By iteration of the current generation: when rank 0 had finished it."""
        self._skipped = 0
        """Of its first iterations."""
        self._waited: dict[int, float] = {}
        """By iteration: seconds of the exchange before it, which end with the iteration before."""
        self._first_s: float | None = None
        self._before: tuple[int, float] | None = None
        """Functions of the generation before, and the time of its latest iterations."""
        self._after_s: float | None = None
        """Time of the first iterations of this generation."""

    def feed(self, event: Event) -> None:
        """Takes an event of the group, with its own ranks, into account."""
        now = self._now
        if isinstance(event, GenerationStarted):
            if event.workers != now.workers:
                before = self._iteration_s(RECENT)
                self._before = None if before is None else (now.workers, before)
                self._after_s = None
            self._now = self._spec.resized(Resize(workers=event.workers, batch_size=event.batch_size), event.from_iteration)
            self._times, self._skipped = {}, 0
        elif isinstance(event, Progress) and event.rank == 0 and event.iteration >= now.from_iteration:
            if self._skipped < FIRST:
                self._skipped += 1
                return
            self._times.setdefault(event.iteration, event.t)
            if len(self._times) == LEAST + 1:
                first_s = self._iteration_s(LEAST)
                self._after_s = first_s
                self._first_s = first_s if self._first_s is None else self._first_s
            if len(self._times) > 2 * RECENT:
                self._times = dict(sorted(self._times.items())[-RECENT - 1 :])
                self._waited = {i: s for i, s in self._waited.items() if i >= min(self._times)}
        elif isinstance(event, RegionExchanged):
            self._waited[event.iteration] = event.seconds

    def _iteration_s(self, most: int) -> float | None:
        """Median time of the latest iterations without exchanges; None: there are too few."""
        latest = sorted(self._times)[-most - 1 :]
        if len(latest) <= LEAST:
            return None
        times = [
            (self._times[end] - self._times[begin] - self._waited.get(end + 1, 0.0)) / (end - begin) for begin, end in pairwise(latest)
        ]
        return max(1e-6, median(times))

    def region(self) -> RunningRegion:
        """The region as it is now."""
        c, workers = self._spec.configuration, self._now.workers
        measured: list[tuple[int, float]] = []
        seconds = self._iteration_s(RECENT)
        if seconds is not None and self._before is not None and self._after_s is not None:
            measured.append((self._before[0], self._before[1] * seconds / self._after_s))
        if seconds is not None:
            measured.append((workers, seconds))
        return RunningRegion(
            name=self._name,
            workers=workers,
            most=self._most,
            global_batch=c.global_batch,
            iterations=self._spec.iterations,
            usd_per_hour=self._spec.prices.functions_usd(self._now.memory_mb / 1024 * 3600, 0),
            begun_with=c.workers,
            first_iteration_s=self._first_s or 0.0,
            measured=tuple(MeasuredIterations(power=float(w), samples=c.global_batch, iteration_s=s) for w, s in measured),
        )


def running_region(name: str, events: Iterable[Event], spec: RunSpec, *, most: int = 0) -> RunningRegion:
    """A region from all events of its group so far; see `RegionMeasurement`."""
    measurement = RegionMeasurement(name, spec, most=most)
    for event in events:
        measurement.feed(event)
    return measurement.region()


def online_plan(regions: Sequence[RunningRegion], *, worth: float = WORTH) -> OnlinePlan | None:
    """Functions with which the regions go on; None: not all regions have been measured.

    The pace is that of the beginning, or what the slowest region reaches with the functions that it began with, if that is faster; every
    region has the fewest functions that keep it, or all that it may have.

    Args:
        regions: of the run.
        worth: least part of time or cost that a change saves.
    """
    if not all(region.measured and region.measured[-1].power == region.workers for region in regions):
        return None
    offers = [
        fitted(
            RegionOffers(
                name=r.name,
                offers=(Offer(kind=_FUNCTION, power=1.0, usd_per_hour=max(r.usd_per_hour, 1e-12)),),
                cores={_FUNCTION: r.most},
                work=1.0,
            ),
            r.measured,
            samples=r.iterations * r.global_batch,
        )
        for r in regions
    ]
    found = replanned(offers, {r.name: (r.workers,) for r in regions}, promised_s=_promised_s(regions, offers), worth=worth)
    changes = []
    for region, choice in zip(regions, found.allocation.choices, strict=True):
        wanted = choice.counts[0] if region.name in found.changed else region.workers
        wanted = _dividing(region, wanted)
        changes.append(
            RegionChange(
                name=region.name,
                workers=region.workers,
                wanted=wanted,
                iteration_s=region.measured[-1].iteration_s,
                batch_size=region.global_batch // wanted,
            )
        )
    after = [each.fixed_s + each.work / change.wanted for each, change in zip(offers, changes, strict=True)]
    return OnlinePlan(
        regions=tuple(changes),
        pass_before_s=found.seconds_before,
        pass_s=max(after),
        usd_per_hour_before=sum(r.workers * r.usd_per_hour for r in regions),
        usd_per_hour=sum(change.wanted * r.usd_per_hour for r, change in zip(regions, changes, strict=True)),
    )


def _promised_s(regions: Sequence[RunningRegion], offers: Sequence[RegionOffers]) -> float:
    """Time of a pass to keep."""
    reachable = max(each.fixed_s + each.work / (r.begun_with or r.most) for r, each in zip(regions, offers, strict=True))
    if not all(r.first_iteration_s for r in regions):
        return reachable
    return min(reachable, max(r.first_iteration_s * r.iterations for r in regions))


def _dividing(region: RunningRegion, wanted: int) -> int:
    """A number of functions that divides the samples of an iteration: the next larger one, so that no region becomes slower than planned."""
    found = [n for n in range(1, region.most + 1) if region.global_batch % n == 0]
    return min((n for n in found if n >= wanted), default=max(found))


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
    places = dict(zip([group.name for group in spec.configuration.regions.region], members_of(folder), strict=True))
    if not places:
        raise JobError(f"run {folder.run_id} has no regions", remedy=f"ephemeron resize {folder.run_id}")
    running = {name: _record(place) for name, place in places.items() if records.read_result(place) is None and place.events.exists()}
    if not running:
        raise UserError(f"run {folder.run_id} is not running")
    most = {group.name: group.most_workers for group in spec.configuration.regions.region}
    found = online_plan(
        [running_region(name, events_of(places[name]), run_spec(record), most=most.get(name, 0)) for name, record in running.items()]
    )
    for change in () if found is None or not apply else found.regions:
        if change.wanted == change.workers:
            continue
        group = next(group for group in spec.configuration.regions.region if group.name == change.name)
        wanted = Resize(workers=change.wanted, batch_size=change.batch_size)
        place, record = places[change.name], running[change.name]
        with environment(variables_of(group.credentials, f"region {change.name}")):
            blocking.run(
                lambda _, place=place, record=record, wanted=wanted: lifecycle.resize(  # type: ignore[misc]
                    place, record, run_spec(record), wanted
                )
            )
    return found


def _record(place: RunFolder) -> RunHeader:
    record = read_header(place)
    if record is None:
        raise UserError(f"{place.path} has no readable {RUN_FILE}")
    return record
