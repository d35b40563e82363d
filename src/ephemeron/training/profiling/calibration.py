"""Calibration runs: short real runs of several functions, which show what no function that runs alone can.

Functions that share a machine start more slowly together than alone; functions in lockstep wait for the slowest; a CPU
share that a step can use up in a burst makes it quicker than probes said, which compute without a pause. Three
calibration runs (many functions with small and with large batches, and two functions) determine the coefficients of these
effects: `start_each_s`, `lockstep_cpu_s`, `first_cpu_s`, `polls_per_get`, and a factor for the step's `a`. Where functions have direct
links, a fourth run over them determines `direct_lockstep_cpu_s`.

What did not help: explaining lockstep by the scatter of steps (its standard deviation times the expected excess of the
slowest of W). It predicts large batches too long and small ones too short, since much of what scatters is the phase of the
CPU quota's periods, which is as long for any step.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.credentials import DIRECT
from ephemeron.errors import PlatformError
from ephemeron.events import Event, Progress, RunStarted, Started
from ephemeron.functions.base import Limits, Platform
from ephemeron.prices import Prices
from ephemeron.runs import folders
from ephemeron.training.driver.launching.prepare import prepare
from ephemeron.training.driver.run_driver import RunDriver
from ephemeron.training.job import Configuration, Job
from ephemeron.training.planner.model.exchange import ExecutionOptions
from ephemeron.training.planner.model.prediction import predict
from ephemeron.training.planner.model.profile import PlatformProfile, Workload
from ephemeron.training.planner.model.provenance import CalibrationProvenance, CalibrationRow

MOST_WORKERS = 4
LASTS_S = 4.0
LEAST_ITERATIONS, MOST_ITERATIONS = 12, 80
WARMING = 4
"""Iterations left out: functions allocate, and learn when to poll."""
SPARE = 1.1
"""A quota is used if it is this much above what the job needs."""
CPU_PART = 0.8
"""Share of this machine's cores that functions may be promised."""
STEP_MB = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationRun:
    """Configuration of one calibration run: BSP, K-REDUCE."""

    workers: int
    aggregators: int
    memory_mb: int
    batch: int
    direct: bool = False
    """Over direct links; else through the store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """Measurements of one calibration run."""

    part: CalibrationRun
    started_s: float
    """Seconds until the last function ran, all having been started at once; 0: not all were cold."""
    first_s: float
    """Seconds from there until the second iteration had been computed."""
    iteration_s: float
    """Mean of those after the first few."""
    step_s: float
    """Mean over all functions."""
    scatter: float
    """Relative standard deviation of the same."""
    cpu_s: float
    """CPU seconds of an iteration, mean over all functions."""
    polls_per_get: float


def parts(workload: Workload, platform: PlatformProfile, *, batches: tuple[int, int], cores: int, limits: Limits) -> list[CalibrationRun]:
    """Calibration runs to do; none if the machine has no room for two functions.

    Args:
        workload, platform: as known so far.
        batches: the smallest and the largest worth probing.
        cores: of this machine.
        limits: of the platform.
    """
    total = CPU_PART * cores * limits.mb_per_vcpu
    low, high = batches
    needed = SPARE * float(workload.memory_needed_mb(low))
    most = min(MOST_WORKERS, limits.concurrency, int(total // max(needed, 1.0)))
    if most < 2:
        return []
    quota = _quota(total / most, limits)
    fits = float(workload.largest_batch(quota / SPARE))
    small = min(2 * low, high)
    large = max(small, int(min(high, fits, _batch_of(workload, LASTS_S / LEAST_ITERATIONS / 2, quota))))
    many = CalibrationRun(workers=most, aggregators=max(1, most // 2), memory_mb=quota, batch=small)
    found = [many, dataclasses.replace(many, batch=large)]
    if most > 2:
        middle = max(1, round(math.sqrt(small * large)))
        found.append(CalibrationRun(workers=2, aggregators=1, memory_mb=_quota(total / 2, limits), batch=middle))
    if platform.over_links() is not None:
        found.append(dataclasses.replace(many, aggregators=most, direct=True))
    return list(dict.fromkeys(found))


def _quota(memory_mb: float, limits: Limits) -> int:
    most = min(memory_mb, limits.mb_per_vcpu, limits.memory_max_mb)
    return max(limits.memory_min_mb, int(most // STEP_MB) * STEP_MB)


def _batch_of(workload: Workload, seconds: float, quota: float) -> float:
    """The batch whose step takes so long (equation 3-12)."""
    return seconds * (quota + workload.m) / workload.a - workload.b


def iterations_of(workload: Workload, part: CalibrationRun) -> int:
    """Number of iterations that last a few seconds."""
    step_s = float(workload.compute_s(part.batch, part.memory_mb))
    return WARMING + round(min(max(LASTS_S / (1.4 * step_s + 0.01), LEAST_ITERATIONS), MOST_ITERATIONS))


def unmonitored(job: Job) -> Job:
    """The job without what waits for a metric, because a calibration run evaluates nothing."""
    monitors = job.scheduler is not None and job.scheduler.monitor is not None
    return dataclasses.replace(job, early_stopping=None, keep_best=None, scheduler=None if monitors else job.scheduler)


async def run(
    job: Job,
    part: CalibrationRun,
    workload: Workload,
    *,
    platform: Platform,
    channel: Channel,
    address: str,
    limits: Limits,
    prices: Prices,
) -> CalibrationResult:
    """Trains a part of the job, and drops its weights.

    Raises:
        PlatformError: the run failed.
        ChannelError: the store does not answer.
    """
    wanted = iterations_of(workload, part) * part.workers * part.batch
    samples = min(wanted, workload.samples)
    free = dataclasses.replace(job.limits, deadline_s=None, budget_usd=None, max_global_batch=None)
    configuration = Configuration(
        platform="local",
        channel=f"{DIRECT}{address}" if part.direct else address,
        pattern="k-reduce",
        workers=part.workers,
        aggregators=part.aggregators,
        memory_mb=part.memory_mb,
        batch_size=part.batch,
        function_timeout_s=limits.lifetime_s,
    ).resolved()
    part_of_job = dataclasses.replace(unmonitored(job), limits=free, epochs=math.ceil(wanted / samples))
    prepared = await asyncio.to_thread(
        prepare,
        part_of_job,
        configuration,
        run_id=folders.new_run_id(f"calibration-{job.name}"),
        limits=limits,
        prices=prices,
        only_first=samples,
    )
    events: list[Event] = []
    trigger = RunDriver(platform, channel, prepared.spec, channel_address=address, clock=time.time, on_event=events.append)
    await trigger.launch(prepared)
    ending = await trigger.watch()
    await channel.delete(await channel.list(f"{prepared.spec.run_id}/"))
    if ending.status != "finished":
        raise PlatformError(f"a calibration run with {part.workers} functions failed: {'; '.join(ending.causes)}")
    begins = next(i for i, e in enumerate(events) if isinstance(e, RunStarted) and e.run_id == prepared.spec.run_id)
    return measured(part, events[begins:])  # before it are those of earlier runs of this platform


def measured(part: CalibrationRun, events: Sequence[Event]) -> CalibrationResult:
    """Measurements from the events of a run."""
    starts = [e for e in events if isinstance(e, Started)]
    latest = max(e.t for e in starts)
    lived: dict[int, list[Progress]] = defaultdict(list)
    for e in events:
        if isinstance(e, Progress):
            lived[e.rank].append(e)
    second = next(e.t for e in lived[0] if e.iteration == 1)
    lived = {rank: [e for e in p if e.iteration >= WARMING] for rank, p in lived.items()}
    full = max(e.samples for p in lived.values() for e in p)
    steps, cpu = [], []
    for p in lived.values():
        p.sort(key=lambda e: e.iteration)
        steps += [_step_s(e) for e in p if e.samples == full]
        cpu.append((p[-1].cpu_s - p[0].cpu_s) / max(1, len(p) - 1))
    pace = [later.t - e.t for e, later in pairwise(lived[0])]
    return CalibrationResult(
        part=part,
        started_s=latest if all(e.cold for e in starts) else 0.0,
        first_s=second - latest,
        iteration_s=statistics.fmean(pace),
        step_s=statistics.fmean(steps),
        scatter=statistics.pstdev(steps) / statistics.fmean(steps),
        cpu_s=statistics.fmean(cpu),
        polls_per_get=_polls_per_get(events),
    )


def _step_s(e: Progress) -> float:
    """The gradient's; the second span of an iteration is the optimiser's step."""
    return next(end - start for phase, start, end in e.spans if phase == "compute")


def _polls_per_get(events: Sequence[Event]) -> float:
    last: dict[int, Progress] = {e.rank: e for e in events if isinstance(e, Progress)}
    return sum(e.traffic.polls for e in last.values()) / max(1, sum(e.traffic.gets for e in last.values()))


def calibrate(
    workload: Workload, platform: PlatformProfile, results: Sequence[CalibrationResult]
) -> tuple[Workload, PlatformProfile, CalibrationProvenance]:
    """Both with the coefficients that calibration runs determine, and what was measured.

    Args:
        workload, platform: as single functions had it.
        results: at least one through the store.
    """
    ratios = [r.step_s / float(workload.compute_s(r.part.batch, r.part.memory_mb)) for r in results]
    scale = statistics.median(ratios)
    bare = dataclasses.replace(workload, a=workload.a * scale, lockstep_cpu_s=0.0, direct_lockstep_cpu_s=None, first_cpu_s=0.0)
    together = [r.started_s / r.part.workers for r in results if r.started_s > 0 and r.part.workers > 2]
    placed = dataclasses.replace(
        platform,
        start_each_s=max(together, default=platform.start_each_s),
        polls_per_get=statistics.median(r.polls_per_get for r in results if not r.part.direct),
    )
    left: dict[bool, list[float]] = {False: [], True: []}
    first = []
    for r in results:
        share = min(r.part.memory_mb, (bare.vcpus or math.inf) * platform.mb_per_vcpu) / platform.mb_per_vcpu
        first.append(max(0.0, r.first_s - 2 * r.iteration_s) * share)
        left[r.part.direct].append(max(0.0, r.iteration_s - _iteration_s(bare, placed, r.part)) * share)
    fitted = dataclasses.replace(
        bare,
        lockstep_cpu_s=statistics.fmean(left[False]),
        first_cpu_s=statistics.median(first),
        direct_lockstep_cpu_s=statistics.fmean(left[True]) if left[True] else None,
    )
    rows = tuple(
        CalibrationRow(
            workers=r.part.workers,
            aggregators=r.part.aggregators,
            memory_mb=r.part.memory_mb,
            batch=r.part.batch,
            iteration_s=round(r.iteration_s, 6),
            scatter=round(r.scatter, 4),
            predicted_s=round(_iteration_s(fitted, placed, r.part), 6),
            step_s=round(r.step_s, 6),
            first_s=round(r.first_s, 6),
            started_s=round(r.started_s, 3),
            cpu_s=round(r.cpu_s, 6),
            polls_per_get=round(r.polls_per_get, 3),
            direct=r.part.direct,
        )
        for r in results
    )
    return fitted, placed, CalibrationProvenance(a_scaled_by=round(scale, 4), runs=rows)


def _iteration_s(workload: Workload, platform: PlatformProfile, part: CalibrationRun) -> float:
    where = platform.over_links() if part.direct else platform
    assert where is not None  # else there would be no such part
    p = predict(
        workload,
        where,
        ExecutionOptions(),
        workers=part.workers,
        memory_mb=part.memory_mb,
        aggregators=part.aggregators,
        batch=part.batch,
        other_batch=part.batch,
    )
    return float(p.iteration_s)
