"""Profile of a job measured on a cloud: by functions of every memory size that is deployed there (FasDL 4.1.2), within a budget.

The probes are those of this machine (`live`), sent as calls of the entry `probe` to the functions that would train. Their
number is fixed beforehand, since each is paid: a first look, then steps and transfers in each size. What is left of the
budget narrows the interval of a step. There are no calibration runs, so a plan does not count what functions in lockstep wait for
each other; a run on the cloud corrects the profile (`refine`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ephemeron import blocking
from ephemeron.communication.channels import open_channel
from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.credentials import environment, public_address
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.signing import SigningKey
from ephemeron.config.typed import plain
from ephemeron.errors import ChannelError, JobError, OutOfMemory, PlanInfeasible
from ephemeron.functions.async_invoke.provider import CapacityRequest, Provider, RunHandle, Settings
from ephemeron.functions.async_invoke.records import calls_prefix
from ephemeron.functions.async_invoke.sizes import not_deployed, sizes_text
from ephemeron.functions.base import Limits
from ephemeron.functions.registry import cloud
from ephemeron.runs import folders
from ephemeron.runs.client_run import ClientRun
from ephemeron.runs.cost import Bill
from ephemeron.runs.profiles import keep, profiling
from ephemeron.training.driver.launching.prepare import Prepared
from ephemeron.training.job import Job
from ephemeron.training.planner.model.fit import TimingSample, fit_memory
from ephemeron.training.planner.model.profile import Profile
from ephemeron.training.planner.model.provenance import CalibrationProvenance, MemoryProvenance, Provenance
from ephemeron.training.profiling import live, probe_design
from ephemeron.training.profiling.api import SPARE, WORTH_A_SECOND_CPU, TransferRows, assembled, first_look
from ephemeron.training.profiling.live import Prober
from ephemeron.training.profiling.preparation import prepared_alone
from ephemeron.training.profiling.probe_bill import BudgetSpent, ProbeBill, ProbeCosts, vcpus_of
from ephemeron.training.profiling.probe_design import Measurement, Range
from ephemeron.training.worker.probe_messages import ParallelTransferRow
from ephemeron.units import MB

_log = logging.getLogger(__name__)

SIZES = (512, 1024, 1769, 3008)
"""Sizes that are measured where a call may have any."""
CALL_S = 120.0
"""Time limit of a probe: PyTorch from a cold image, then some seconds for each batch."""
BATCHES = 4
"""Batches that are measured in each size."""
WINDOWS = 3
REPEATS = 4
"""Of each transfer."""
MORE = 6
"""Further probes of steps, at most, while the interval is wider than wanted and the budget lasts."""
_SIZES_MB = (0.001, 0.01, 0.03, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0)


def cloud_profile(
    job: Job,
    platform: str,
    *,
    channel: str,
    settings: Settings | None,
    sizes_mb: Sequence[int],
    budget_usd: float,
    confidence: float,
    on_progress: Callable[[str], None],
    on_budget: Callable[[str], None],
    out: Path | None,
) -> Profile:
    """See `api.profile_job`."""
    public, secrets = public_address(channel)
    if "://" not in public:
        raise JobError(f"functions on {platform} cannot reach channel {channel!r}", remedy="give --channel s3://bucket/prefix")
    where = cloud(platform)
    settings = (settings or where.settings()).located()
    asked = CapacityRequest(workers=1, memory_mb=0, lifetime_s=0.0, channel=public)
    _, limits = where.admit(asked, settings, secrets)
    sizes = sizes_to_probe(limits, sizes_mb, platform)
    prepared = prepared_alone(job, channel=public, limits=limits, platform=platform)  # type: ignore[arg-type]
    costs = costs_of(prepared, sizes, limits)
    on_budget(costs.text(budget_usd))
    costs.check(budget_usd)
    bill, began = ProbeBill(costs, budget_usd), time.monotonic()

    async def measure() -> Profile:
        async with _probing(where, platform, settings, prepared, public, secrets, costs, bill, on_progress) as prober:
            found = await _measure(prober, prepared, platform, costs, confidence)
            found = dataclasses.replace(found, fit=dataclasses.replace(found.fit, seconds=round(time.monotonic() - began, 1)))
            keep(prober.record, found, out)
            return found

    return blocking.run(lambda _: measure())


def sizes_to_probe(limits: Limits, wanted: Sequence[int], platform: str) -> tuple[int, ...]:
    """Memory sizes to measure, ascending.

    Args:
        limits: of the platform, with the sizes that are deployed.
        wanted: by the user; none: all that are deployed, or `SIZES` where any may be called.
        platform: for the error.

    Raises:
        JobError: a wanted size is not deployed, or beyond the limits.
    """
    if limits.sizes_mb:
        for size in wanted:
            if size not in limits.sizes_mb:
                raise JobError(
                    f"no function of {size} MB is deployed on {platform}, only of {sizes_text(limits.sizes_mb)}",
                    remedy=not_deployed(limits.sizes_mb, size, limits.deploy),
                )
        return tuple(sorted(wanted or limits.sizes_mb))
    low, high = limits.memory_min_mb, limits.memory_max_mb
    for size in wanted:
        if not low <= size <= high:
            raise JobError(f"a function of {size} MB does not fit {platform}: {low} to {high} MB")
    return tuple(sorted(wanted or {min(max(size, low), high) for size in SIZES}))


def costs_of(prepared: Prepared, sizes: Sequence[int], limits: Limits) -> ProbeCosts:
    """Largest cost of the probes."""
    prices = prepared.spec.prices
    first = _one_vcpu(sizes, limits)
    puts = len(_transfer_sizes_mb(prepared)) * (1 + REPEATS) + 2 * REPEATS * (1 + live.PARALLEL)
    nbytes = 2 * sum(size * (1 + REPEATS) for size in _transfer_sizes_mb(prepared)) * MB
    request_usd = puts * (prices.put_usd + prices.get_usd) + (3 + REPEATS) * prices.get_usd + nbytes * prices.byte_usd
    return ProbeCosts(
        sizes_mb=tuple(sizes), first_mb=first, call_s=min(CALL_S, limits.lifetime_s), prices=prices, requests_usd=len(sizes) * request_usd
    )


def _one_vcpu(sizes: Sequence[int], limits: Limits) -> int:
    """The largest size of one vCPU or less, else the smallest."""
    return max((size for size in sizes if size <= limits.mb_per_vcpu), default=min(sizes))


def _transfer_sizes_mb(prepared: Prepared) -> list[float]:
    """MB of the objects that are transferred."""
    return [*_SIZES_MB, float(min(64.0, max(8.0, 1.5 * prepared.model_bytes / MB)))]


@asynccontextmanager
async def _probing(
    where: Provider[Any],
    name: str,
    settings: Any,
    prepared: Prepared,
    channel: str,
    secrets: dict[str, str],
    costs: ProbeCosts,
    bill: ProbeBill,
    on_progress: Callable[[str], None],
) -> AsyncIterator[Prober]:
    """The cloud's functions with the job's objects in its channel, as a run; no object is left afterwards."""
    run = prepared.spec.run_id
    folder = folders.runs_folder() / run
    async with contextlib.AsyncExitStack() as stack:
        record = await stack.enter_async_context(
            profiling(
                run,
                prepared.spec.name,
                platform=name,
                channel=channel,
                prices=costs.prices,
                memory_mb=costs.first_mb,
                lifetime_s=costs.call_s,
                budget_usd=bill.budget_usd,
                settings=plain(settings),
            )
        )
        stack.callback(_bill, record, bill)

        def tell(text: str) -> None:
            record.say(text)
            on_progress(text)

        stack.enter_context(environment(secrets))
        store = await stack.enter_async_context(open_channel(channel))
        stack.push_async_callback(_clear, store, run)
        signing = SigningKey.new()
        for key, buffers in prepared.objects.items():
            await RunChannel(store, owner="profile", signing=signing).put(key, buffers)
        capacity = CapacityRequest(workers=1, memory_mb=costs.first_mb, lifetime_s=costs.call_s, channel=channel)
        platform = await where.open(
            RunHandle(run=run, run_dir=folder, capacity=capacity, channel=channel, since=time.time(), starting=True), settings
        )
        stack.push_async_callback(platform.shutdown)
        yield Prober(
            platform, run, channel, store.traits, platform.limits, tell, store, None, signing, record, lifetime_s=costs.call_s, bill=bill
        )


def _bill(record: ClientRun, bill: ProbeBill) -> None:
    """The bill of the run: of its functions from their outcomes, and of requests to the channel as much as they were admitted with."""
    record.more |= {
        "cost_usd": round(bill.spent_usd, 9),
        "billed": Bill(gb_seconds=round(bill.gb_seconds, 6), requests=bill.calls, storage_usd=round(bill.requests_usd, 9)),
    }


async def _clear(store: Channel, run: str) -> None:
    with contextlib.suppress(ChannelError):
        for prefix in (f"{run}/", f"{calls_prefix(run)}/"):
            await store.delete(await store.list(prefix))


async def _measure(prober: Prober, prepared: Prepared, platform: str, costs: ProbeCosts, confidence: float) -> Profile:
    limits, bill = prober.limits, prober.bill
    assert bill is not None
    first, top, raw = await first_look(prober, prepared, costs.first_mb)
    over, cells, refused = await _steps(prober, first, top, costs.sizes_mb)
    found = await _transfers(prober, prepared, costs.sizes_mb, refused)
    vcpus, speedup = _vcpus(cells, limits)
    cells, kept_out, stopped = await _refine_cells(prober, over, cells, vcpus, confidence)
    usable = [c for c in cells if c.memory_mb <= vcpus * limits.mb_per_vcpu or c.memory_mb == min(over.quotas)]
    fitted = probe_design.fit(usable)
    known = assembled(
        prober,
        prepared,
        found,
        name=platform,
        cold_start_s=statistics.median(prober.cold_s or prober.warm_s),
        source=f"measured on {platform} by its functions of {sizes_text(costs.sizes_mb)}, channel {prober.address}, "
        f"{time.strftime('%Y-%m-%d')}",
    )
    peaks = [*first, *cells, *kept_out]
    memory = fit_memory([c.batch for c in peaks], [c.peak_mb for c in peaks])
    return Profile(
        workload=live.build_workload(prepared, raw, fitted, memory, vcpus),
        platform=known.platform.of_sizes(limits.sizes_mb),
        fit=Provenance(
            steps=probe_design.step_provenance(fitted, usable, kept_out, over, confidence, stopped),
            memory=MemoryProvenance(probes=len(peaks)),
            calibration=CalibrationProvenance(note="no calibration runs on a cloud"),
            second_vcpu_speedup=speedup,
            too_small_quotas_mb=tuple(refused),
            platform=dataclasses.replace(known.fit, sizes_mb=costs.sizes_mb, calls=prober.calls, billed_usd=round(bill.spent_usd, 6)),
        ),
    )


async def _steps(
    prober: Prober, first: Sequence[Measurement], top: int, sizes: Sequence[int]
) -> tuple[Range, list[Measurement], list[int]]:
    """Steps of several batches in each size that the model fits. Returns range, cells, and sizes that are too small.

    Raises:
        PlanInfeasible: all are.
    """
    memory = fit_memory([c.batch for c in first], [c.peak_mb for c in first])
    bottom = min(c.batch for c in first)
    batches = probe_design.steps_of(bottom, top, BATCHES) if top > bottom else (bottom,)
    cells: list[Measurement] = []
    refused: list[int] = []
    for size in sizes:
        fits = [b for b in batches if SPARE * (memory.base_mb + memory.slope_mb * b) <= size]
        try:
            if fits:
                cells += await prober.steps(size, fits, windows=WINDOWS)
        except OutOfMemory:
            _log.warning("a probe at %d MB ran out of memory, the size is left out", size)
            fits = []
        if not fits:
            refused.append(size)
    if not cells:
        raise PlanInfeasible(f"no function of {sizes_text(sizes)} holds the model and a batch of {bottom} samples", binding="memory")
    fitting = tuple(size for size in sizes if size not in refused)
    return Range(batches=batches, quotas=fitting), cells, refused


async def _transfers(prober: Prober, prepared: Prepared, sizes: Sequence[int], refused: list[int]) -> TransferRows:
    """Puts, gets and polls in each size, also in those that are too small for the model."""
    timings: list[TimingSample] = []
    together: list[ParallelTransferRow] = []
    polls: list[float] = []
    for size in sizes:
        try:
            raw = await prober.transfers(size, _transfer_sizes_mb(prepared), REPEATS)
        except OutOfMemory:
            if size not in refused:
                refused.append(size)
            continue
        timings += live.transfer_timings(size, raw)
        together += raw.together
        polls += raw.polls_s
    if not timings:
        raise PlanInfeasible(f"no function of {sizes_text(sizes)} has the memory of a probe", binding="memory")
    return TransferRows(timings=timings, together=together, polls=polls)


def _vcpus(cells: Sequence[Measurement], limits: Limits) -> tuple[float, float | None]:
    """CPU share that a step uses, and the speedup of the largest size against that of one vCPU; None: there is no larger one."""
    of_batch = {b: [c for c in cells if c.batch == b] for b in {c.batch for c in cells}}
    # The largest of the batches that most sizes hold: where threads help most.
    row = max(of_batch.values(), key=lambda found: (len(found), found[0].batch))
    seconds = [(limits.vcpus(c.memory_mb), c.seconds) for c in row]
    ordered = sorted(seconds)
    if ordered[-1][0] <= 1.0 or len(ordered) < 2:
        return 1.0, None
    reference = max((r for r in ordered if r[0] <= 1.0), default=ordered[0])
    return vcpus_of(seconds, worth=WORTH_A_SECOND_CPU), round(reference[1] / ordered[-1][1], 3)


async def _refine_cells(
    prober: Prober, over: Range, cells: list[Measurement], vcpus: float, confidence: float
) -> tuple[list[Measurement], list[Measurement], str]:
    """Further steps until their interval is as wanted. Returns the cells, those kept out of the fit, and why it ended."""
    most_mb = vcpus * prober.limits.mb_per_vcpu
    quotas = tuple(size for size in over.quotas if size <= most_mb) or over.quotas[:1]
    inner = Range(batches=over.batches, quotas=quotas)
    held = set(inner.kept_out)
    kept_out = [c for c in cells if (c.batch, c.memory_mb) in held]
    left = [c for c in cells if (c.batch, c.memory_mb) not in held]
    for _ in range(MORE):
        usable = [c for c in left if c.memory_mb in quotas]
        if probe_design.enough(usable, inner, confidence):
            return left, kept_out, "confident"
        wanted = probe_design.next_probe(usable, inner)
        if wanted is None:
            return left, kept_out, "most probes"
        try:
            left += await prober.steps(wanted[1], [wanted[0]], windows=WINDOWS)
        except BudgetSpent as e:
            return left, kept_out, f"budget: {e}"
        except OutOfMemory:
            return left, kept_out, "out of memory"
    return left, kept_out, "most probes"
