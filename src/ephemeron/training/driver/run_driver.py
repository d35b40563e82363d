"""Driver of a run (the trigger of FasDL, section 4.2.1): stores the objects, launches the workers, supervises, collects the result.

It may end at any time: the workers do not need it once they are launched. A client that attaches later reads the same events and
decides the same as if it had supervised from the beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import os
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.retrying import Outage, RetryPolicy
from ephemeron.communication.channels.run_channel import RunChannel, outage_text
from ephemeron.communication.keys import Keys
from ephemeron.communication.signing import SigningKey
from ephemeron.config.typed import build
from ephemeron.errors import ChannelError, InvocationRefused, KeyExists, PlatformError
from ephemeron.events import Event, GenerationStarted, Note, RunEnded, RunStarted
from ephemeron.functions.base import Call, Platform, Reason
from ephemeron.runs.cost import CostMeter
from ephemeron.runs.function_set import AGAIN_S, MOST_REFUSALS
from ephemeron.training.collectives.chunking import best_chunk_bytes, measure_requests
from ephemeron.training.driver.adaptation import Adaptation
from ephemeron.training.driver.launching.prepare import Prepared
from ephemeron.training.driver.renewal import Renewal
from ephemeron.training.driver.resizing import check_request
from ephemeron.training.driver.supervisor import Action, Fail, Finish, Replace, RunSupervisor, Stopped
from ephemeron.training.job import parse_fault
from ephemeron.training.job.generation import Resize
from ephemeron.training.task.outputs import PREFIX
from ephemeron.training.tensors import Arrays, decode_state, digest
from ephemeron.training.worker.control import ResizeRequest, encode_control
from ephemeron.training.worker.finalize import clear, parts_of
from ephemeron.training.worker.recovery import fencing
from ephemeron.training.worker.recovery.fencing import Claim
from ephemeron.training.worker.recovery.generations import current_generation, members_of
from ephemeron.training.worker.request import RECOVER, WorkerRequest
from ephemeron.training.worker.result import FinalState
from ephemeron.training.worker.spec import RunSpec
from ephemeron.training.worker.trainers.trainer import WeightNotes

_log = logging.getLogger(__name__)

STOP_GRACE_S = 15.0
"""Seconds that functions may take to stop at a checkpoint before they are killed."""
END_GRACE_S = 10.0
QUIET_S = 60.0
"""Seconds without any event, while no function is known to run, after which all ranks are replaced: what was claimed last was
never started."""
RESULT_S = 10.0
"""Seconds to look for the result of a run that was stopped or has failed."""

Status = Literal["finished", "stopped", "failed"]


@dataclass(slots=True)
class RunOutcome:
    """End of a run."""

    status: Status
    causes: list[str]
    arrays: Arrays | None = None
    final: FinalState | None = None
    """Metadata of the run's result; None: it has none."""
    files: Arrays = field(default_factory=dict)
    """Files of rank 0's program, by `task.outputs.PREFIX` and path."""
    kept: dict[int, tuple[Arrays, dict[str, object]]] = field(default_factory=dict)
    """Weights that evaluations have kept, and their plain values, by iteration."""


class RunDriver:
    """A client that drives a run.

    Args:
        platform: where its functions run.
        channel: the client's own connection.
        spec: of the run.
        channel_address: address of the channel for functions, without secrets.
        clock: Unix time for real platforms, loop time for the simulated one.
        origin: the clock at the run's t = 0; None: now.
        session: `wall_time` of the launch or resume to attach to.
        on_event: sees every event, old ones first.
        signing: key of the run; None: a new run without a folder makes its own.
    """

    def __init__(
        self,
        platform: Platform,
        channel: Channel,
        spec: RunSpec,
        *,
        channel_address: str,
        clock: Callable[[], float],
        origin: float | None = None,
        session: float = 0.0,
        on_event: Callable[[Event], None] = lambda event: None,
        signing: SigningKey | None = None,
        labels: Mapping[str, str] | None = None,
    ) -> None:
        self.platform, self.spec, self.on_event = platform, spec, on_event
        self._labels = labels or {}
        self.signing = signing or SigningKey.new()
        self.retry = RetryPolicy(total_s=spec.configuration.channel_retry_s)
        # In virtual time there is one client, and its jitter is a function of the run.
        owner = f"client-{clock()!r}-{os.getpid() if channel.traits.shared else 0}"
        self.channel = RunChannel(channel, owner=owner, retry=self.retry, told=self._outage, run=spec.run_id, signing=self.signing)
        self.address = channel_address
        self.keys = Keys(spec.run_id)
        self.supervisor = RunSupervisor(spec.configuration.workers, evaluates_at=spec.evaluates_at)
        self.ledger = CostMeter(spec.prices, servers=spec.servers)
        self._quotas_mb = {0: spec.configuration.memory_mb}
        """By generation, memory of its functions."""
        self._adaptation = Adaptation(spec, platform.limits) if spec.configuration.resize.adapt else None
        self._wanted: Resize | None = None
        """Change that is to be asked for."""
        self._clock = clock
        self.origin = clock() if origin is None else origin
        self.session = session
        self.notes: tuple[str, ...] = ()
        self._current = False
        self._stop_reason = ""
        self.stop_requested = asyncio.Event()
        self.kill_requested = asyncio.Event()

    # -- launching ----------------------------------------------------------------------------------------

    async def launch(self, prepared: Prepared) -> None:
        """Puts the objects and starts one function per rank."""
        self.notes = prepared.notes
        self.spec = spec = await self._with_chunks(prepared)
        objects = [(key, buffers) for key, buffers in prepared.objects.items() if key != self.keys.spec]
        await asyncio.gather(*(self.channel.put(key, buffers) for key, buffers in objects))
        await self.channel.put(self.keys.spec, [spec.to_bytes()])
        await self._announce()
        if not spec.chunk_bytes:
            text = "pipelined: at what requests take here, whole shards are faster than chunks, so shards are sent whole"
            await self.platform.emit(spec.run_id, Note(t=self.now(), level="info", text=text))
        await asyncio.gather(*(self._invoke(rank, 0, "start") for rank in range(spec.configuration.workers)))
        _log.info("launched %d functions on %s", spec.configuration.workers, self.platform.name)

    async def _with_chunks(self, prepared: Prepared) -> RunSpec:
        """The specification with the chunk size of the pipelined form, measured at stores that are polled."""
        spec, c = self.spec, self.spec.configuration
        polled = self.channel.traits.service == "objects" and self.platform.name != "simulated"
        if c.pattern != "pipelined" or not polled:
            return spec
        cost = await measure_requests(self.channel, self.keys.probe("requests"))
        chunk = best_chunk_bytes(c.group, c.aggregators, model_bytes=prepared.model_bytes, cost=cost)
        return dataclasses.replace(spec, chunk_bytes=chunk)

    async def resume(self, last_t: float, renewal: Renewal | None = None) -> None:
        """Starts every rank again from its newest checkpoint, with new code if there is any.

        The run's clock continues from `last_t`.
        """
        self.origin = self._clock() - last_t
        await self.channel.delete([self.keys.control])
        if renewal is not None:
            await self.channel.put(self.keys.code, [renewal.bundle])
        await fencing.restore(self.channel, self.keys)
        now = await current_generation(self.channel, self.keys, self.spec)
        await self._announce(now)
        self.supervisor.world, self.supervisor.generation = now.configuration.workers, now.current_generation.number
        if renewal is not None:
            await self.platform.emit(self.spec.run_id, Note(t=self.now(), text=str(renewal)))
        keys = dataclasses.replace(self.keys, generation=self.supervisor.generation)
        following = fencing.first_attempt(self.supervisor.generation + 1)
        for rank in await self._ranks():  # functions that waited for the next generation are started anew
            await self.channel.delete([keys.claim(rank, following), keys.start(rank, following)])
        for rank in range(self.supervisor.world):
            attempt = await fencing.latest_attempt(self.channel, keys, rank) + 1
            if await fencing.claim(self.channel, keys, rank, attempt, Claim(at_s=self.now())):
                await self._invoke(rank, attempt, "resume")

    async def _ranks(self) -> list[int]:
        """Ranks of the current generation and, if it is agreed on, of the next one."""
        following = await members_of(self.channel, self.keys, self.supervisor.generation + 1)
        return list(range(max(self.supervisor.world, 0 if following is None else following.workers)))

    async def _announce(self, spec: RunSpec | None = None) -> None:
        """Emits that the run starts, or goes on.

        Args:
            spec: in its current generation; None: in the first one.
        """
        self.session = time.time()
        spec = spec or self.spec
        c = spec.configuration
        await self.platform.emit(
            spec.run_id,
            RunStarted(
                t=self.now(),
                run_id=spec.run_id,
                job=spec.name or spec.program,
                workers=c.workers,
                aggregators=c.aggregators,
                memory_mb=c.memory_mb,
                iterations=spec.planned_iterations,
                merges_evaluations=spec.shares_evaluations,
                epochs=spec.epochs,
                samples=spec.samples,
                configuration=describe(spec),
                platform=self.platform.name,
                wall_time=self.session,
                notes=[*self.platform.unenforced, *self.notes],
                traffic=self.channel.traffic,
            ),
        )

    async def _invoke(self, rank: int, attempt: int, reason: Reason, *, not_after: int | None = None) -> None:
        generation = fencing.generation_of(attempt)
        if generation not in self._quotas_mb:  # it has not begun
            members = await members_of(self.channel, self.keys, generation)
            if members is not None:
                self._quotas_mb[generation] = members.memory_mb
        await self.platform.invoke(self.call(rank, attempt, reason, not_after=not_after))

    def call(self, rank: int, attempt: int, reason: Reason, *, not_after: int | None = None) -> Call:
        """Call of a function of this run."""
        c = self.spec.configuration
        faults = map(parse_fault, self.spec.faults)
        return Call(
            run=self.spec.run_id,
            rank=rank,
            attempt=attempt,
            memory_mb=self._quotas_mb.get(fencing.generation_of(attempt), c.memory_mb),
            lifetime_s=c.function_timeout_s,
            channel=self.address,
            entry="worker" if self.spec.stages is None else "stage",
            key=self.signing.text,
            reason=reason,
            origin=self.origin,
            labels=self._labels,
            duplicate=attempt == 0 and any(f.kind == "duplicate" and f.rank == rank for f in faults),
            request=WorkerRequest(channel_retry_s=c.channel_retry_s, not_after=not_after).to_json(),
        )

    def interrupt(self, reason: str = "") -> None:
        """Requests a stop at a checkpoint; the second time, a kill. A reason becomes an event of the run."""
        self._stop_reason = self._stop_reason or reason
        (self.kill_requested if self.stop_requested.is_set() else self.stop_requested).set()

    def now(self) -> float:
        """Seconds of the run."""
        return self._clock() - self.origin

    # -- watching -----------------------------------------------------------------------------------------

    async def watch(self) -> RunOutcome:
        """Supervises the run until it and its last function have ended."""
        ending: RunOutcome | None = None
        events = self.platform.events(self.spec.run_id)
        upcoming = asyncio.ensure_future(anext(events))
        stopper: asyncio.Future[RunOutcome] = asyncio.ensure_future(self._stop_when_asked())
        deadline: float | None = None
        killed = False
        loop = asyncio.get_running_loop()
        try:
            while ending is None or self.supervisor.running:
                left = None if deadline is None else max(0.0, deadline - loop.time())
                if ending is None and self._current and not self.supervisor.running:
                    left = QUIET_S
                waiting: list[asyncio.Future[Any]] = [upcoming, stopper]
                done, _ = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if not done and ending is None:
                    ending = await self._attempted(self._replace_all())
                    continue
                if not done:
                    if killed:
                        break  # the platform has lost sight of them
                    killed = True
                    _log.warning("cancelling functions that have not ended %g s after the run", END_GRACE_S)
                    await self.platform.cancel_all(self.spec.run_id)
                    deadline = loop.time() + END_GRACE_S
                if stopper in done:
                    ending = ending or stopper.result()
                    stopper = loop.create_future()  # asked once; this one never comes
                if upcoming in done:
                    try:
                        event = upcoming.result()
                    except PlatformError as e:  # nothing more will be heard of the functions
                        ending = ending or self._given_up(e)
                        break
                    upcoming = asyncio.ensure_future(anext(events))
                    actions = self._read(event)
                    ending = ending or await self._attempted(self._act(actions))
                    ending = ending or await self._attempted(self._adapt())
                if ending is not None and deadline is None:
                    deadline = loop.time() + END_GRACE_S
        finally:
            upcoming.cancel()
            stopper.cancel()
        assert ending is not None
        if ending.status != "finished" and await self._has_result():
            ending = RunOutcome("finished", [])  # it was over before it was to be stopped
        if ending.status == "finished":
            await self.collect(ending)
            with contextlib.suppress(ChannelError):  # those who were ended now could not do it themselves
                await clear(self.channel, self.keys, parts=parts_of(self.spec))
        await self._end(ending)
        return ending

    async def _attempted(self, action: Coroutine[Any, Any, RunOutcome | None]) -> RunOutcome | None:
        """Outcome of an action; a failed run, where store or platform do not let it be done."""
        try:
            return await action
        except (ChannelError, PlatformError) as e:
            await self.platform.cancel_all(self.spec.run_id)
            return self._given_up(e)

    async def _replace_all(self) -> RunOutcome | None:
        """Replaces every rank that has not ended: an attempt was claimed by a function that died before it could start it."""
        over = self.supervisor.finished | self.supervisor.stopped
        lost = [rank for rank in range(self.supervisor.world) if rank not in over]
        text = f"no function runs, and nothing has happened for {QUIET_S:.0f} s: ranks {lost} are replaced"
        await self.platform.emit(self.spec.run_id, Note(t=self.now(), level="warning", text=text))
        keys = dataclasses.replace(self.keys, generation=self.supervisor.generation)
        latest = [await fencing.latest_attempt(self.channel, keys, rank) for rank in lost]
        return await self._act([Replace(rank, attempt + 1) for rank, attempt in zip(lost, latest, strict=True)])

    def _given_up(self, e: Exception) -> RunOutcome:
        _log.info("the run fails: %s: %s", type(e).__name__, e)
        remedy = f"remove the cause, then continue with: ephemeron resume {self.spec.run_id}"
        return RunOutcome("failed", [f"{type(e).__name__}: {e}; {remedy}"])

    def _outage(self, outage: Outage) -> None:
        text = outage_text(outage, who="client", policy=self.retry)
        self.on_event(Note(t=self.now(), level="info" if outage.over else "warning", text=text))

    def _read(self, event: Event) -> list[Action]:
        """Takes an event in. Events of earlier sessions count for the cost only and cause no actions."""
        self.ledger.feed(event)
        self.on_event(event)
        if isinstance(event, RunStarted):
            self._current = event.wall_time == self.session
            s = self.supervisor
            self.supervisor = RunSupervisor(s.world, evaluates_at=s.evaluates_at, generation=s.generation, latest=s.latest)
        if isinstance(event, GenerationStarted):
            self._quotas_mb[event.generation] = event.memory_mb
        if self._adaptation is not None:
            wanted = self._adaptation.feed(event, self.ledger)
            self._wanted = wanted if self._current else None
        actions = self.supervisor.feed(event)
        return actions if self._current else []

    async def _adapt(self) -> RunOutcome | None:
        """Asks for the change that keeps the limits of the job."""
        wanted, self._wanted = self._wanted, None
        if wanted is None:
            return None
        request = ResizeRequest(name=f"adapt {self.now():.3f}", resize=wanted)
        text = f"the deadline or the budget is about to be missed: asks for {wanted.workers} functions"
        await self.platform.emit(self.spec.run_id, Note(t=self.now(), level="warning", text=text))
        await self.channel.put(self.keys.control, [encode_control(request)])
        return None

    async def ask(self, wanted: Resize, *, name: str) -> bool:
        """Asks the functions for a change, which they make at their next opportunity; returns whether they were asked.

        Args:
            wanted: the change.
            name: of the request.

        Raises:
            JobError, PlanInfeasible: the run cannot change so.
            ChannelError: the store cannot be reached.
        """
        now = await current_generation(self.channel, self.keys, self.spec)
        check_request(now, wanted, self.platform.limits)
        if self.stop_requested.is_set():
            return False
        await self.channel.put(self.keys.control, [encode_control(ResizeRequest(name=name, resize=wanted))])
        return True

    async def _act(self, actions: list[Action]) -> RunOutcome | None:
        for action in actions:
            match action:
                case Finish():
                    return RunOutcome("finished", [])
                case Stopped(cause):
                    return self._stopped(cause)
                case Fail(cause):
                    _log.info("the run fails: %s", cause)
                    await self.platform.cancel_all(self.spec.run_id)
                    return RunOutcome("failed", [cause])
                case Replace(rank, attempt):
                    most = self.spec.most_replacements
                    await fencing.check_left(self.channel, self.keys, most, rank=rank, iteration=None)
                    missed = await self._still_missed(rank, attempt - 1)
                    claim = Claim(at_s=self.now(), not_after=missed)
                    if await fencing.claim(self.channel, self.keys, rank, attempt, claim):
                        await fencing.spend(self.channel, self.keys, most, rank=rank, iteration=None)
                        _log.info("replacing rank %d with attempt %d", rank, attempt)
                        await self._replace(rank, attempt, not_after=missed)
                    else:  # its own successor waits for the iteration to continue at
                        with contextlib.suppress(KeyExists):
                            await self.channel.put(self.keys.hand(rank, attempt), [RECOVER], create=True)
        return None

    async def _still_missed(self, rank: int, attempt: int) -> int | None:
        """The iteration that an attempt was to send again, if it has died before it could."""
        claim = await fencing.claimed(self.channel, self.keys, rank, attempt)
        if claim is None or claim.not_after is None or self.supervisor.reached.get(rank, -1) >= claim.not_after:
            return None
        return claim.not_after

    async def _replace(self, rank: int, attempt: int, *, not_after: int | None = None) -> None:
        """Starts a replacement; at the concurrency limit, as soon as a function has ended."""
        tries = MOST_REFUSALS
        while True:
            try:
                return await self._invoke(rank, attempt, "replacement", not_after=not_after)
            except InvocationRefused as e:
                tries -= 1
                if e.binding != "concurrency" or not tries:
                    raise
                _log.debug("no place for a replacement of rank %d, %d tries left: %s", rank, tries, e)
            await asyncio.sleep(AGAIN_S)

    async def _stop_when_asked(self) -> RunOutcome:
        """Stops the run at a checkpoint at the first request; kills it at the second one or after a timeout. Both can be resumed."""
        await self.stop_requested.wait()
        _log.info("stopping at a checkpoint")
        if self._stop_reason:
            await self.platform.emit(
                self.spec.run_id, Note(t=self.now(), level="warning", text=f"stops at a checkpoint: {self._stop_reason}")
            )
        telling = asyncio.ensure_future(self.channel.put(self.keys.control, [b"stop"]))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S):
                await self.kill_requested.wait()
        telling.cancel()
        await asyncio.gather(telling, return_exceptions=True)
        await self.platform.cancel_all(self.spec.run_id)
        return self._stopped()

    def _stopped(self, limit: str = "") -> RunOutcome:
        cause = self._stop_reason or limit or self.supervisor.limit
        return RunOutcome("stopped", [cause] if cause else [])

    async def _has_result(self) -> bool:
        with contextlib.suppress(ChannelError, TimeoutError):
            async with asyncio.timeout(RESULT_S):
                return await self.channel.fetch(self.keys.result) is not None
        return False

    async def collect(self, ending: RunOutcome) -> None:
        """Fetches the result of a finished run."""
        try:
            deadline = asyncio.get_running_loop().time() + 30
            received = await self.channel.get(self.keys.result, deadline=deadline)
            await read_result(ending, self.channel, self.keys, received.data)
        except ChannelError as e:
            ending.status, ending.arrays, ending.final = "failed", None, None
            ending.causes.append(f"rank 0 ended, but its result cannot be read: {e}")

    async def _end(self, ending: RunOutcome) -> None:
        for cause in ending.causes:
            level: Literal["warning", "error"] = "warning" if ending.status == "stopped" else "error"
            note = Note(t=self.now(), level=level, text=cause)
            self.on_event(note)
            await self.platform.emit(self.spec.run_id, note)
        _log.info("run ended: %s", ending.status)
        ended = RunEnded(t=self.ledger.ended_at, status=ending.status, causes=ending.causes)
        await self.platform.emit(self.spec.run_id, ended)
        self.on_event(ended)


async def read_result(ending: RunOutcome, channel: Channel, keys: Keys, data: memoryview | bytes) -> None:
    """Reads `RUN/result` into an outcome. The weights of a divided model are joined here: no function could hold them all.

    Raises:
        ChannelError: the result or a part of the weights is damaged or absent.
    """
    arrays, meta = decode_state(data, key=keys.result)
    ending.files = {name: arrays.pop(name) for name in list(arrays) if name.startswith(PREFIX)}
    final = FinalState.read(meta, key=keys.result)
    if final.parts:
        bf16: list[str] = []
        for stage in range(final.parts):
            received = await channel.get(keys.part(stage), deadline=asyncio.get_running_loop().time() + 30)
            part, notes = decode_state(received.data, key=keys.part(stage))
            arrays |= part
            bf16 += build(WeightNotes, notes, where=keys.part(stage)).bf16
        final = dataclasses.replace(final, weights_sha256=digest(arrays), bf16=tuple(bf16))
    for iteration in final.kept:
        received = await channel.get(keys.kept(iteration), deadline=asyncio.get_running_loop().time() + 30)
        ending.kept[iteration] = decode_state(received.data, key=keys.kept(iteration))
    ending.arrays, ending.final = arrays, final


def _program(spec: RunSpec) -> dict[str, object]:
    if spec.script is not None:
        return {"script": " ".join([spec.program, *spec.script.script.arguments])}
    if spec.task is not None:
        return {"task": spec.program}
    return {"optimizer": spec.optimizer.target, "loss": spec.loss.target}


def describe(spec: RunSpec) -> dict[str, object]:
    """The configuration by the names of the options, for reports."""
    c = spec.configuration
    between: dict[str, object] = (
        {}
        if len(c.regions.region) < 2
        else {
            "regions_plan": c.regions.plan,
            "regions_exchange": c.regions.sync,
            "regions_compression": c.regions.compression,
            "regions_exchange_every": c.regions.exchange_every,
        }
    )
    return between | {
        "pattern": c.pattern,
        "sync": c.sync,
        "channel": c.channel,
        "exchange": c.exchanged,
        "local_steps": c.exchange.local_steps,
        "compression": c.exchange.compression,
        "workers": c.workers,
        "aggregators": c.aggregators,
        "memory_mb": None if between else c.memory_mb,
        "batch_size": c.batch_size,
        "nonaggregator_batch_size": c.nonaggregator_batch_size,
        "global_batch": c.global_batch,
        "function_timeout_s": c.function_timeout_s,
        "checkpoint_every": c.checkpoint_every,
        "budget_usd": spec.budget_usd,
        **(
            {}
            if spec.stages is None
            else {
                "stages": c.stages.count,
                "replicas": c.stages.replicas,
                "micro_batches": c.stages.micro_batches,
                "schedule": c.stages.schedule,
            }
        ),
        **_program(spec),
        "seed": spec.seed,
        "dtype": spec.dtype,
    }
