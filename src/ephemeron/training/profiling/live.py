"""Probes as functions of this machine: one at a time, so that no probe disturbs another.

A new quota is a cold start; every further call of the same quota finds a warm function. Both are measured on the way. What
a profile needs of cold starts is how long a run's first functions take: the first here, with its imports, which later ones
are forked from.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import statistics
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass, field

from ephemeron.communication.channels import open_channel
from ephemeron.communication.channels.base import Channel, Traits
from ephemeron.communication.channels.credentials import environment
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.channels.wrappers import size_of
from ephemeron.communication.keys import Keys
from ephemeron.communication.signing import SigningKey
from ephemeron.errors import ChannelError, FunctionFailed, FunctionLost, FunctionTimedOut, OutOfMemory
from ephemeron.functions.base import Call, Limits, Platform
from ephemeron.functions.entries import PRELOAD_VARIABLE, PRELOADS
from ephemeron.functions.local import LocalPlatform
from ephemeron.runs import folders
from ephemeron.runs.client_run import ClientRun
from ephemeron.runs.profiles import profiling
from ephemeron.training.collectives.direct_messages import ONE_PHASE_BYTES
from ephemeron.training.driver import parameter_server
from ephemeron.training.driver.launching.prepare import Prepared
from ephemeron.training.planner.model.direct_links import DirectLinks
from ephemeron.training.planner.model.fit import MemoryFit, StepFit, TimingSample
from ephemeron.training.planner.model.profile import Workload
from ephemeron.training.profiling.probe_bill import ProbeBill
from ephemeron.training.profiling.probe_design import Measurement
from ephemeron.training.worker.probe_messages import (
    FoldProbe,
    LinkProbe,
    LinkResult,
    ProbeRequest,
    ProbeResult,
    StepProbe,
    StepTiming,
    TransferProbe,
    TransferResult,
)
from ephemeron.units import MB

_log = logging.getLogger(__name__)

WINDOW_S = 0.6
"""Six periods of Linux's CPU quotas."""
WINDOWS = 4
LINKED, LINK_MB, LINK_REPEATS = 3, 32.0, 5
"""Other members when it is measured how long it takes to connect to several; MB of an exchange, and how often."""
PARALLEL = 8
"""Requests at once, when it is measured how many overlap."""
SMALL_SHARE = 0.5
"""Share of a vCPU below which windows are twice as long, since a function is throttled for most of each period."""


@dataclass(slots=True)
class Prober:
    """Functions that measure."""

    platform: Platform
    run: str
    address: str
    traits: Traits
    limits: Limits
    on_progress: Callable[[str], None]
    store: Channel
    actors: Platform | None
    """Platform of calibration runs, whose functions are workers; None: there are none."""
    signing: SigningKey
    """Key of the objects that probes read."""
    record: ClientRun
    """The run that the calls belong to."""
    lifetime_s: float = 0.0
    """Time limit of a call; 0: the platform's."""
    bill: ProbeBill | None = None
    """Budget of the calls; None: they cost nothing."""
    cold_s: list[float] = field(default_factory=list)
    warm_s: list[float] = field(default_factory=list)
    calls: int = 0
    last: ProbeResult | None = None
    """Result of the latest call."""

    async def call(self, memory_mb: int, request: ProbeRequest | None = None) -> ProbeResult:
        """Runs one probe; without a request it measures its own start.

        Raises:
            BudgetSpent: it could cost more than is left; it was not called.
            OutOfMemory, FunctionTimedOut, FunctionLost, FunctionFailed: it ended badly.
        """
        if self.bill is not None:
            self.bill.admit(memory_mb)
        self.calls += 1
        call = Call(
            run=self.run,
            rank=0,
            attempt=self.calls,
            memory_mb=memory_mb,
            lifetime_s=self.lifetime_s or self.limits.lifetime_s,
            channel=self.address,
            entry="probe",
            key=self.signing.text,
            origin=self.record.header.started_at,
            request=asdict(request or ProbeRequest()),
        )
        invoked = time.time()
        outcome = await (await self.platform.invoke(call)).wait()
        if self.bill is not None:
            self.bill.add(outcome)
        if outcome.status != "ok":
            text = f"a probe of {memory_mb} MB: {outcome.error.strip().splitlines()[0] if outcome.error else outcome.status}"
            kinds = {"out_of_memory": OutOfMemory, "timed_out": FunctionTimedOut, "error": FunctionFailed}
            raise kinds.get(outcome.status, FunctionLost)(text, rank=0, attempt=self.calls)
        result = self.last = ProbeResult.of(outcome.value)
        _log.debug("probe %d at %d MB: %s start", self.calls, memory_mb, "cold" if result.cold else "warm")
        # Clocks of a cloud and of this machine may differ by more than a warm start takes.
        (self.cold_s if result.cold else self.warm_s).append(max(0.0, result.entered_wall - invoked))
        return result

    async def steps(
        self, memory_mb: int, batches: list[int], *, window_s: float = WINDOW_S, windows: int = WINDOWS, fold: FoldProbe | None = None
    ) -> list[Measurement]:
        """Measures steps of these batches at one quota."""
        self.on_progress(f"steps of {', '.join(map(str, batches))} samples at {memory_mb} MB")
        longer = 2.0 if self.limits.vcpus(memory_mb) < SMALL_SHARE else 1.0
        probe = StepProbe(batches=tuple(batches), window_s=longer * window_s, windows=windows)
        result = await self.call(memory_mb, ProbeRequest(probe=probe, fold=fold))
        return [_cell(part, memory_mb) for part in result.steps]

    async def transfers(self, memory_mb: int, sizes_mb: list[float], repeats: int) -> TransferResult:
        """Measures puts, gets and empty polls at one quota."""
        self.on_progress(f"transfers at {memory_mb} MB")
        wanted = TransferProbe(sizes_mb=tuple(sizes_mb), repeats=repeats, parallel=PARALLEL)
        transfer = (await self.call(memory_mb, ProbeRequest(transfer=wanted))).transfer
        assert transfer is not None  # it was asked for
        return transfer

    async def links(self, memory_mb: int) -> LinkResult:
        """Measures direct links between two functions of one quota.

        Raises:
            FunctionFailed: they cannot connect.
        """
        self.on_progress(f"direct links at {memory_mb} MB")
        generation = 1 + 3 * self.calls
        both = (LinkProbe(first=first, generation=generation, others=LINKED, mb=LINK_MB, repeats=LINK_REPEATS) for first in (True, False))
        calls = (self.call(memory_mb, ProbeRequest(links=probe)) for probe in both)
        found = await asyncio.gather(*calls, return_exceptions=True)
        for result in found:
            if isinstance(result, BaseException):
                raise result
        first = found[0]
        assert isinstance(first, ProbeResult)
        assert first.links is not None  # it was asked for
        return first.links


def transfer_timings(memory_mb: int, raw: TransferResult) -> list[TimingSample]:
    """Both directions of every size: medians, since a disturbance only ever makes a transfer longer."""
    out = []
    for size in sorted({row.size_mb for row in raw.rows}):
        rows = [row for row in raw.rows if row.size_mb == size]
        for direction, seconds in (("up", [row.up_s for row in rows]), ("down", [row.down_s for row in rows])):
            out.append(TimingSample(direction, memory_mb, size, max(statistics.median(seconds), 1e-7)))
    return out


def _cell(part: StepTiming, memory_mb: int) -> Measurement:
    windows = part.seconds
    middle = statistics.median(windows)
    spread = statistics.stdev(windows) / middle / len(windows) ** 0.5 if len(windows) > 1 else 0.0
    return Measurement(batch=part.batch, memory_mb=memory_mb, seconds=middle, spread=spread, peak_mb=part.peak_mb, steps=part.steps)


@asynccontextmanager
async def probing(
    prepared: Prepared, *, channel: str, secrets: dict[str, str], limits: Limits, on_progress: Callable[[str], None]
) -> AsyncIterator[Prober]:
    """A platform of its own with the job's objects in its channel, as a run; no object is left afterwards.

    Raises:
        EphemeronError: the platform does not start, or the channel does not answer.
    """
    run = prepared.spec.run_id
    folder = folders.runs_folder() / run
    address = (folder / "objects").resolve().as_uri() if channel == "folder" else channel
    async with contextlib.AsyncExitStack() as stack:
        record = await stack.enter_async_context(
            profiling(
                run,
                prepared.spec.name,
                channel=address,
                prices=prepared.spec.prices,
                memory_mb=min(int(limits.mb_per_vcpu), limits.memory_max_mb),
            )
        )

        def tell(text: str) -> None:
            record.say(text)
            on_progress(text)

        if channel == "parameter_server":
            server = parameter_server.start(folder)
            stack.callback(server.stop)
            address, secrets = server.address, {**secrets, "EPHEMERON_CHANNEL_TOKEN": server.token}
        stack.enter_context(environment(secrets))
        store = await stack.enter_async_context(open_channel(address))
        stack.push_async_callback(_clear, store, run)
        signing = SigningKey.new()
        for key, buffers in prepared.objects.items():
            await RunChannel(store, owner="profile", signing=signing).put(key, buffers)
        env = {**secrets, PRELOAD_VARIABLE: ",".join(PRELOADS["probe"])}
        _log.info("probing functions of this machine over %s", channel)
        platform = await LocalPlatform.start(folder, limits=limits, env=env)
        stack.push_async_callback(platform.shutdown)
        (folder / "calibration").mkdir()
        actors = await LocalPlatform.start(folder / "calibration", limits=limits, env=secrets)
        stack.callback(record.collect, folder / "calibration" / "events.jsonl")
        stack.push_async_callback(actors.shutdown)
        yield Prober(platform, run, address, store.traits, limits, tell, store, actors, signing, record)


async def _clear(store: Channel, run: str) -> None:
    with contextlib.suppress(ChannelError):
        await store.delete(await store.list(f"{run}/"))


def data_mb(prepared: Prepared) -> float:
    """MB of what functions get of the training set: the samples, or with a flow their numbers."""
    return size_of(prepared.objects[Keys(prepared.spec.run_id).data(0)]) / MB


def build_workload(prepared: Prepared, raw: ProbeResult, fitted: StepFit, memory: MemoryFit, vcpus: float) -> Workload:
    """The workload of a profile, from the first look at the job and the fits of its probes."""
    spec, folded = prepared.spec, raw.fold
    assert folded is not None  # the first look asks for it
    per_mb = statistics.median([*folded.pack_s, *folded.unpack_add_s]) / max(folded.mb, 1e-9)
    return Workload(
        name=spec.name,
        model_mb=raw.model_bytes / MB,
        a=fitted.a,
        b=fitted.b,
        m=fitted.m,
        memory_slope_mb=memory.slope_mb,
        memory_base_mb=max(memory.base_mb, raw.load_peak_mb),
        dataset_mb=data_mb(prepared),
        samples=spec.samples,
        test_samples=prepared.test_samples,
        state_mb=raw.state_bytes / MB,
        vcpus=vcpus,
        fold_s_per_mb=per_mb,
        apply_s=statistics.median([p.apply_s for p in raw.steps]),
    )


async def measure_direct_links(prober: Prober, memory_mb: int) -> DirectLinks | None:
    """Direct links between functions of a quota; None: they cannot connect, or have no store to meet at.

    Raises:
        OutOfMemory, FunctionTimedOut, FunctionLost: a probe ended badly.
    """
    if prober.traits.service == "server":
        return None
    try:
        raw = await prober.links(memory_mb)
    except FunctionFailed as e:
        _log.warning("direct links are not planned for, because they could not be measured: %s", e)
        return None
    return fit_links(raw, mb=LINK_MB, others=LINKED)


def fit_links(raw: LinkResult, *, mb: float, others: int) -> DirectLinks:
    """Coefficients from measurements: medians, since a disturbance only ever makes anything longer.

    Args:
        raw: what two functions have measured.
        mb: that each of them has sent in an exchange.
        others: members that were connected to at once.
    """
    each = max(0.0, raw.all_links_s - raw.one_link_s) / (others - 1)
    return DirectLinks(
        latency_s=statistics.median(raw.latency_s),
        mb_s=mb / statistics.median(raw.exchange_s),
        cpu_s_per_mb=statistics.median(raw.exchange_cpu_s) / mb,
        setup_s=max(0.0, raw.one_link_s - each),
        setup_each_s=each,
        one_phase_mb=ONE_PHASE_BYTES / MB,
        source=f"measured between two functions of this machine, over {raw.transport}",
    )
