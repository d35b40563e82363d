"""Blocking interface of the profiler: job in, profile out."""

from __future__ import annotations

import dataclasses
import logging
import math
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from ephemeron import blocking
from ephemeron.communication.channels.credentials import public_address
from ephemeron.config.paths import cores
from ephemeron.errors import JobError, OutOfMemory, PlanInfeasible
from ephemeron.functions.async_invoke.provider import Settings
from ephemeron.functions.base import Limits
from ephemeron.functions.registry import CLOUDS
from ephemeron.runs.profiles import keep, write
from ephemeron.training.driver.launching.launch import platform_limits
from ephemeron.training.driver.launching.prepare import Prepared
from ephemeron.training.job import Job
from ephemeron.training.planner.model.builtin import priced
from ephemeron.training.planner.model.fit import RateFit, TimingSample, TransferFit, fit_memory, fit_transfers
from ephemeron.training.planner.model.profile import PlatformProfile, Profile, QuotaRange, Workload
from ephemeron.training.planner.model.provenance import (
    CalibrationProvenance,
    MemoryProvenance,
    PlatformProvenance,
    Provenance,
    TransferProvenance,
    TransferRow,
)
from ephemeron.training.profiling import calibration, live, probe_design, store
from ephemeron.training.profiling.live import Prober, measure_direct_links
from ephemeron.training.profiling.preparation import prepared_alone
from ephemeron.training.profiling.probe_bill import BUDGET_USD
from ephemeron.training.profiling.probe_design import Measurement, Range
from ephemeron.training.worker.probe_messages import FoldProbe, ParallelTransferRow, ProbeResult
from ephemeron.units import MB

_log = logging.getLogger(__name__)

OnProgress = Callable[[str], None]

WITHIN_S = 65.0
"""After which no further probe is started."""
LONGEST_STEP_S = 1.0
"""At one vCPU; larger batches are not probed."""
LARGEST_BATCH = 1024
SMALLEST_BATCH = 8
QUOTA_STEP_MB = 64
SPARE = 1.1
"""A quota is probed if it is this much above what the probes so far say that is needed."""
WORTH_A_SECOND_CPU = 1.15
REPEATS = 7


def profile_job(
    job: Job,
    *,
    platform: str = "local",
    channel: str = "folder",
    confidence: float = 0.05,
    limits: Limits | None = None,
    use_cache: bool = True,
    within_s: float = WITHIN_S,
    on_progress: OnProgress = lambda text: None,
    cloud: Settings | None = None,
    sizes_mb: Sequence[int] = (),
    budget_usd: float = BUDGET_USD,
    on_budget: OnProgress = lambda text: None,
    out: Path | None = None,
) -> Profile:
    """Measures what a plan has to know.

    Args:
        job: whose model and data.
        platform: `local`; `simulated`, which is asked instead of measured; or a cloud, whose functions are paid.
        channel: address, as for training.
        confidence: wanted relative half width of the 95 % interval of every predicted step.
        limits: of the platform; None: its own.
        use_cache: reuse what an earlier measurement of the platform found; False: measure it again.
        within_s: no further probe is started after this.
        on_progress: called with a description of each step.
        cloud: where on a cloud; None: its defaults.
        sizes_mb: memory sizes to measure on a cloud; none: those that are deployed, or `cloud.SIZES`.
        budget_usd: on a cloud, what the probes may cost at most.
        on_budget: on a cloud, called with the probes and their largest cost, before the first is started.
        out: file to which the profile is written, too; the folder of its run has it anyway.

    Raises:
        UserError: refused: an argument, the job, or a model that fits no quota.
        PlatformError, ChannelError: a probe ended badly, or the store does not answer.
    """
    if not 0 < confidence < 1:
        raise JobError(f"confidence = {confidence:g} should be between 0 and 1", remedy="0.05 is 5 %")
    if within_s <= 0:
        raise JobError(f"within_s = {within_s:g} should be above 0")
    if job.script is not None:
        raise JobError(f"script {job.program.target} cannot be profiled", remedy="choose workers yourself: --workers")
    if job.sparse is not None:
        raise JobError("a sparse job has a profile of its own", remedy="make it with: ephemeron profile JOB")
    if platform in CLOUDS:
        from ephemeron.training.profiling.cloud import cloud_profile

        return cloud_profile(
            job,
            platform,
            channel=channel,
            settings=cloud,
            sizes_mb=sizes_mb,
            budget_usd=budget_usd,
            confidence=confidence,
            on_progress=on_progress,
            on_budget=on_budget,
            out=out,
        )
    limits = limits or platform_limits(platform)
    if platform == "simulated":
        from ephemeron.training.profiling.simulated import simulated_profile

        simulated = simulated_profile(job, channel=channel, limits=limits, on_progress=on_progress)
        if out is not None:
            write(simulated, out)
        return simulated
    if platform != "local":
        raise JobError(f"platform {platform!r} cannot be probed from here", remedy=f"use local, simulated, {', '.join(CLOUDS)}")
    if channel == "memory":
        raise JobError("channel 'memory' lives in one process and cannot join functions", remedy="use folder")
    began = time.monotonic()
    public, secrets = public_address(channel)
    prepared = prepared_alone(job, channel=public, limits=limits, platform="local")
    known = store.load("local", public) if use_cache else None

    async def measure() -> Profile:
        async with live.probing(prepared, channel=public, secrets=secrets, limits=limits, on_progress=on_progress) as prober:
            found = await _measure(prober, prepared, public, known, confidence, began + within_s)
            found = dataclasses.replace(found, fit=dataclasses.replace(found.fit, seconds=round(time.monotonic() - began, 1)))
            keep(prober.record, found, out)
            return found

    return blocking.run(lambda _: measure())


async def _measure(prober: Prober, prepared: Prepared, channel: str, known: store.Known | None, confidence: float, end: float) -> Profile:
    limits = prober.limits
    high = _quota(min(limits.mb_per_vcpu, limits.memory_max_mb), limits, up=False)
    first, top, raw = await first_look(prober, prepared, high)
    over = _range(prepared, limits, first, top, high)
    cells, kept_out, refused, stopped = await _probe(prober, over, confidence, end)
    fitted = probe_design.fit(cells)
    _log.info("probed %d steps, %d kept out of the fit: %s", len(cells), len(kept_out), stopped)
    if known is None:
        known = await _platform(prober, prepared, channel, sorted({over.quotas[0], over.quotas[-1]}))
    second = await _second_cpu(prober, cells, high, end)
    peaks = [*first, *cells, *kept_out]
    memory = fit_memory([c.batch for c in peaks], [c.peak_mb for c in peaks])
    workload = live.build_workload(prepared, raw, fitted, memory, 2.0 if second and second >= WORTH_A_SECOND_CPU else 1.0)
    workload, platform, calibrated = await _calibrate(prober, prepared, workload, known.platform, over)
    if not known.reused:
        known = dataclasses.replace(known, platform=platform)
        store.save("local", channel, known)
    fit = Provenance(
        calibration=calibrated,
        steps=probe_design.step_provenance(fitted, cells, kept_out, over, confidence, stopped),
        memory=MemoryProvenance(
            raised_mb=round(memory.raised_mb, 1),
            probes=len(peaks),
            note="holds the whole training set, one message of the whole vector and one checkpoint",
        ),
        second_vcpu_speedup=second,
        too_small_quotas_mb=tuple(refused),
        platform=dataclasses.replace(known.fit, reused=known.reused),
    )
    return Profile(workload=workload, platform=known.platform, fit=fit)


async def _calibrate(
    prober: Prober, prepared: Prepared, workload: Workload, platform: PlatformProfile, over: Range
) -> tuple[Workload, PlatformProfile, CalibrationProvenance]:
    """Runs several functions at once, if this machine has room for them, and corrects the coefficients."""
    ends = over.batches[0], over.batches[-1]
    actors = prober.actors
    assert actors is not None  # `live.probing` has them
    todo = calibration.parts(workload, platform, batches=ends, cores=cores(), limits=prober.limits)
    done = []
    for part in todo:
        over_links = ", over direct links" if part.direct else ""
        prober.on_progress(f"calibration run of {part.workers} functions of {part.memory_mb} MB, {part.batch} samples each{over_links}")
        result = await calibration.run(
            prepared.job,
            part,
            workload,
            platform=actors,
            channel=prober.store,
            address=prober.address,
            limits=prober.limits,
            prices=prepared.spec.prices,
        )
        done.append(result)
    if not done:
        _log.info("no calibration runs: this machine has no room for two functions")
        return workload, platform, CalibrationProvenance(note="this machine has no room for two functions")
    return calibration.calibrate(workload, platform, done)


# -- the workload -------------------------------------------------------------------------------------------


async def first_look(prober: Prober, prepared: Prepared, high: int) -> tuple[list[Measurement], int, ProbeResult]:
    """Short windows of two small batches at one vCPU: what larger ones may take.

    Returns:
        What was measured, the largest batch that is worth probing, and the raw answer.
    """
    samples = prepared.spec.samples
    most = prepared.job.limits.max_global_batch or LARGEST_BATCH
    most = max(1, min(most, LARGEST_BATCH, samples // 2))
    low = min(SMALLEST_BATCH, most)
    pair = sorted({low, min(4 * low, most)})
    try:
        cells = await prober.steps(high, pair, window_s=0.25, windows=2, fold=FoldProbe(repeats=9))
    except OutOfMemory:
        raise PlanInfeasible(
            f"a batch of {pair[-1]} samples does not fit {high} MB; use a smaller model or smaller samples", binding="memory"
        ) from None
    slow, large = cells[0], cells[-1]
    assert prober.last is not None  # the call above has set it
    if large is slow:
        return cells, most, prober.last
    per_sample = max((large.seconds - slow.seconds) / (large.batch - slow.batch), 1e-9)
    slope = max((large.peak_mb - slow.peak_mb) / (large.batch - slow.batch), 0.0)
    in_time = large.batch + (LONGEST_STEP_S - large.seconds) / per_sample
    in_memory = large.batch + (high / SPARE - large.peak_mb) / slope if slope > 0 else math.inf
    return cells, max(large.batch, min(most, int(min(in_time, in_memory)))), prober.last


def _range(prepared: Prepared, limits: Limits, first: Sequence[Measurement], top: int, high: int) -> Range:
    """Batches from small to `top`; quotas from what those need to one vCPU."""
    memory = fit_memory([c.batch for c in first], [c.peak_mb for c in first])
    needed = SPARE * (memory.base_mb + memory.slope_mb * top)
    low = min(_quota(max(needed, limits.memory_min_mb), limits, up=True), high)
    bottom = min(c.batch for c in first)
    batches = probe_design.steps_of(bottom, top, 6) if top > bottom else (bottom,)
    inner = probe_design.steps_of(low, high, 5, multiple=QUOTA_STEP_MB)[1:-1] if low < high else ()
    quotas = {low, high, *(q for q in (_quota(q, limits, up=True) for q in inner) if q < high)}
    return Range(batches=batches, quotas=tuple(sorted(quotas)))


def _quota(memory_mb: float, limits: Limits, *, up: bool) -> int:
    """A quota that the platform sells, on a step of 64 MB where it can be."""
    step = max(limits.memory_step_mb, QUOTA_STEP_MB if up else 1)
    low = limits.memory_min_mb
    count = (memory_mb - low) / step
    return max(low, min(limits.memory_max_mb, low + step * int(math.ceil(count - 1e-9) if up else count + 1e-9)))


async def _probe(prober: Prober, over: Range, confidence: float, end: float) -> tuple[list[Measurement], list[Measurement], list[int], str]:
    """Probes until every step is known well enough. Returns cells, cells kept out, quotas too small, and why it ended."""
    cells: list[Measurement] = []
    kept_out: list[Measurement] = []
    refused: list[int] = []
    looks = 0
    while True:
        held = [c for c in over.kept_out if c not in {(k.batch, k.memory_mb) for k in kept_out}]
        if len(cells) >= len(over.corners) and held and not kept_out:
            kept_out += await prober.steps(held[0][1], [b for b, _ in held])
            continue
        if len(cells) >= len(over.corners) and probe_design.enough(cells, over, confidence):
            return cells, kept_out, refused, "confident"
        if time.monotonic() > end and len(cells) >= len(over.corners):
            return cells, kept_out, refused, "out of time"
        wanted = probe_design.next_probe(cells, over)
        if wanted is None:
            again = probe_design.doubtful(cells) if looks < probe_design.SECOND_LOOKS else None
            if again is None:
                return cells, kept_out, refused, "most probes"
            looks += 1
            (second,) = await prober.steps(again.memory_mb, [again.batch])
            cells[cells.index(again)] = min(again, second, key=lambda c: c.seconds)
            continue
        batch, quota = wanted
        missing = {b for b, m in over.corners if m == quota} - {c.batch for c in cells if c.memory_mb == quota}
        try:
            cells += await prober.steps(quota, sorted(missing | {batch}) if batch in missing else [batch])
        except OutOfMemory:
            # The peak alone did not say it: leave the quota out, as a plan will have to.
            _log.warning("a probe at %d MB ran out of memory, the quota is left out", quota)
            refused.append(quota)
            quotas = tuple(q for q in over.quotas if q > quota)
            if not quotas:
                raise
            over = Range(batches=over.batches, quotas=quotas)
            cells = [c for c in cells if c.memory_mb > quota]


async def _second_cpu(prober: Prober, cells: Sequence[Measurement], high: int, end: float) -> float | None:
    """Speedup of the largest batch by a second vCPU; None if this machine has no second core, or no time is left."""
    limits = prober.limits
    quota = _quota(2 * limits.mb_per_vcpu, limits, up=True)
    at_one = [c for c in cells if c.memory_mb == high]
    if cores() < 2 or quota < 2 * limits.mb_per_vcpu or not at_one or time.monotonic() > end:
        return None
    largest = max(at_one, key=lambda c: c.batch)
    (cell,) = await prober.steps(quota, [largest.batch], windows=2)
    return round(largest.seconds / cell.seconds, 3)


# -- the platform -------------------------------------------------------------------------------------------


async def _platform(prober: Prober, prepared: Prepared, channel: str, quotas: Sequence[int]) -> store.Known:
    """Starts, transfers and polls."""
    model_mb = prepared.model_bytes / MB
    sizes = [0.001, 0.01, 0.03, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, float(min(64.0, max(8.0, 1.5 * model_mb)))]
    timings: list[TimingSample] = []
    together: list[ParallelTransferRow] = []
    polls: list[float] = []
    for quota in quotas:
        raw = await prober.transfers(quota, sizes, REPEATS)
        timings += live.transfer_timings(quota, raw)
        together += raw.together
        polls += raw.polls_s
    while not prober.warm_s:
        await prober.call(quotas[0])
    source = f"measured by functions of this machine ({store.this_machine()}), channel {channel}"
    found = TransferRows(timings=timings, together=together, polls=polls)
    known = assembled(prober, prepared, found, name="local", cold_start_s=prober.cold_s[0], source=source)
    return dataclasses.replace(known, platform=dataclasses.replace(known.platform, links=await measure_direct_links(prober, quotas[-1])))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TransferRows:
    """What probes have measured of a channel."""

    timings: Sequence[TimingSample]
    together: Sequence[ParallelTransferRow]
    polls: Sequence[float]


def assembled(prober: Prober, prepared: Prepared, found: TransferRows, *, name: str, cold_start_s: float, source: str) -> store.Known:
    """A platform's profile from starts, transfers and polls."""
    fitted, together, polls = fit_transfers(found.timings), found.together, found.polls
    limits, prices = prober.limits, prepared.spec.prices
    overlap = _overlap(together)
    service = prober.traits.service
    bare = PlatformProfile(
        name=name,
        memory_mb=QuotaRange(min=limits.memory_min_mb, max=limits.memory_max_mb, step=max(limits.memory_step_mb, QUOTA_STEP_MB)),
        lifetime_s=limits.lifetime_s,
        cold_start_s=cold_start_s,
        warm_start_s=statistics.median(prober.warm_s or [cold_start_s]),
        price_gb_s=0.0,
        price_invocation=0.0,
        poll_s=0.0 if prober.traits.waits else statistics.median(polls),
        channel=service if service in ("cache", "server") else "objects",
        concurrency=limits.concurrency,
        mb_per_vcpu=limits.mb_per_vcpu,
        parallel=max(1, round(overlap)),
        transfer=fitted.transfer,
        source=source,
        notes=prober.platform.unenforced,
    )
    fit = PlatformProvenance(
        transfer=transfer_provenance(fitted),
        cold_starts_s=tuple(round(s, 3) for s in prober.cold_s),
        warm_starts_s=tuple(round(s, 4) for s in prober.warm_s),
        polls_s=tuple(round(s, 6) for s in polls),
        overlap=round(overlap, 2),
        measured_on=time.strftime("%Y-%m-%d"),
    )
    return store.Known(platform=priced(bare, prices), fit=fit)


def _overlap(rows: Sequence[ParallelTransferRow]) -> float:
    """Number of requests at once that take the time of one: the worse direction, small objects."""
    small = min(row.size_mb for row in rows)
    mine = [row for row in rows if row.size_mb == small]
    up = statistics.median(row.up_alone_s / row.up_s for row in mine)
    down = statistics.median(row.down_alone_s / row.down_s for row in mine)
    return live.PARALLEL * min(up, down)


def transfer_provenance(fitted: TransferFit) -> TransferProvenance:
    """Form and error, per direction and quota."""

    def form(fit: RateFit) -> str:
        return type(fit.rate).__name__.lower()

    return TransferProvenance(
        error_up=probe_design.finite(fitted.error_up),
        error_down=probe_design.finite(fitted.error_down),
        rows=tuple(
            TransferRow(
                memory_mb=quota,
                up=form(fitted.up[quota]),
                up_error=probe_design.finite(fitted.up[quota].error),
                down=form(fitted.down[quota]),
                down_error=probe_design.finite(fitted.down[quota].error),
            )
            for quota in fitted.up
        ),
    )
