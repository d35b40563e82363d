"""The trigger (FasDL, section 4.2.1): puts everything into the channel, launches the workers, watches, collects.

It may go away at any moment: the workers need it no more once they are launched. Whoever comes later, by `attach`,
reads the same events and does the same as if it had been there from the beginning.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from ephemeron.channels.base import Channel
from ephemeron.channels.keys import Keys
from ephemeron.channels.wrappers import Metered
from ephemeron.errors import ChannelError, ChannelTimeout, InvocationRefused, KeyExists
from ephemeron.events import Event, Note, RunEnded, RunStarted
from ephemeron.platforms.base import Call, Platform, Reason
from ephemeron.tensors import Arrays, decode_state, digest
from ephemeron.training.bill import Ledger
from ephemeron.training.prepare import Prepared
from ephemeron.training.supervisor import Action, Fail, Finish, Replace, Stopped, Supervisor
from ephemeron.worker import lease
from ephemeron.worker.life import RECOVER
from ephemeron.worker.spec import RunSpec

STOP_GRACE_S = 15.0
"""How long functions may take to stop at a checkpoint before they are killed."""
ROOM_S, ROOM_TRIES = 1.0, 60
"""How often a replacement is tried while the platform has no place for it: functions that end make room."""
END_GRACE_S = 10.0

Status = Literal["finished", "stopped", "failed"]


@dataclass(slots=True)
class Ending:
    """How a run ended for the one who watched."""

    status: Status
    causes: list[str]
    arrays: Arrays | None = None
    final: dict[str, Any] | None = None


class Trigger:
    """One client's hold on one run.

    Args:
        platform, channel: where it runs; the channel is the trigger's own connection.
        spec: what runs.
        channel_address: what functions are told, without secrets.
        clock: Unix time for real platforms, loop time for the simulated one.
        origin: the clock at the run's t = 0; None: now.
        session: `wall_time` of the launch or resume to attach to.
        on_event: sees every event, old ones first.
    """

    def __init__(
        self, platform: Platform, channel: Channel, spec: RunSpec, *, channel_address: str,
        clock: Callable[[], float], origin: float | None = None, session: float = 0.0, on_event: Callable[[Event], None] = lambda event: None,
    ) -> None:  # fmt: skip
        self.platform, self.spec, self.on_event = platform, spec, on_event
        self.channel = Metered(channel)
        self.address = channel_address
        self.keys = Keys(spec.run_id)
        self.supervisor = Supervisor(spec.configuration.workers)
        self.ledger = Ledger(spec.prices)
        self._clock = clock
        self.origin = clock() if origin is None else origin
        self.session = session
        self._current = False
        self.stop_requested = asyncio.Event()
        self.kill_requested = asyncio.Event()

    # -- launching ----------------------------------------------------------------------------------------

    async def launch(self, prepared: Prepared) -> None:
        """Puts the objects and starts one function per rank."""
        spec = self.spec
        *objects, last = prepared.objects.items()
        await asyncio.gather(*(self.channel.put(key, buffers) for key, buffers in objects))
        await self.channel.put(*last)
        await self._announce()
        await asyncio.gather(*(self._invoke(rank, 0, "start") for rank in range(spec.configuration.workers)))

    async def resume(self, last_t: float) -> None:
        """Starts every rank again, from its newest checkpoint. The run's clock goes on from `last_t`."""
        self.origin = self._clock() - last_t
        await self.channel.delete([self.keys.control])
        await self._announce()
        for rank in range(self.spec.configuration.workers):
            attempt = await lease.latest_attempt(self.channel, self.keys, rank) + 1
            if await lease.take(self.channel, self.keys.claim(rank, attempt), f"{self.now():.3f}"):
                await self._invoke(rank, attempt, "resume")

    async def _announce(self) -> None:
        self.session = time.time()
        spec, c = self.spec, self.spec.configuration
        await self.platform.emit(
            spec.run_id,
            RunStarted(
                t=self.now(),
                run_id=spec.run_id,
                job=spec.name or spec.model.target,
                workers=c.workers,
                aggregators=c.aggregators,
                memory_mb=c.memory_mb,
                iterations=spec.iterations,
                epochs=spec.epochs,
                samples=spec.samples,
                configuration=describe(spec),
                platform=self.platform.name,
                wall_time=self.session,
                notes=list(self.platform.unenforced),
                traffic=self.channel.traffic,
            ),
        )

    async def _invoke(self, rank: int, attempt: int, reason: Reason) -> None:
        await self.platform.invoke(self.call(rank, attempt, reason))

    def call(self, rank: int, attempt: int, reason: Reason) -> Call:
        """What a function of this run is told."""
        c = self.spec.configuration
        options: dict[str, Any] = {"origin": self.origin}
        if attempt == 0 and any(f.startswith(f"duplicate:rank={rank}") for f in self.spec.faults):
            options["duplicate"] = True
        return Call(
            run=self.spec.run_id,
            rank=rank,
            attempt=attempt,
            memory_mb=c.memory_mb,
            lifetime_s=c.lifetime_s,
            channel=self.address,
            reason=reason,
            options=options,
        )

    def now(self) -> float:
        """Seconds of the run."""
        return self._clock() - self.origin

    # -- watching -----------------------------------------------------------------------------------------

    async def watch(self) -> Ending:
        """Supervises until the run has ended and its last function with it."""
        ending: Ending | None = None
        events = self.platform.events(self.spec.run_id)
        upcoming = asyncio.ensure_future(anext(events))
        stopper: asyncio.Future[Ending] = asyncio.ensure_future(self._stop_when_asked())
        deadline: float | None = None
        killed = False
        loop = asyncio.get_running_loop()
        try:
            while ending is None or self.supervisor.running:
                left = None if deadline is None else max(0.0, deadline - loop.time())
                waiting: list[asyncio.Future[Any]] = [upcoming, stopper]
                done, _ = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    if killed:
                        break  # the platform has lost sight of them
                    killed = True
                    await self.platform.cancel_all(self.spec.run_id)
                    deadline = loop.time() + END_GRACE_S
                if stopper in done:
                    ending = ending or stopper.result()
                    stopper = loop.create_future()  # asked once; this one never comes
                if upcoming in done:
                    event = upcoming.result()
                    upcoming = asyncio.ensure_future(anext(events))
                    actions = self._read(event)
                    try:
                        ending = ending or await self._act(actions)
                    except (ChannelError, InvocationRefused) as e:
                        ending = Ending("failed", [f"{type(e).__name__}: {e}"])
                        await self.platform.cancel_all(self.spec.run_id)
                if ending is not None and deadline is None:
                    deadline = loop.time() + END_GRACE_S
        finally:
            upcoming.cancel()
            stopper.cancel()
        assert ending is not None
        if ending.status == "finished":
            await self.collect(ending)
        await self._end(ending)
        return ending

    def _read(self, event: Event) -> list[Action]:
        """Earlier sessions of a run count for its bill, and decide nothing any more."""
        self.ledger.feed(event)
        self.on_event(event)
        if isinstance(event, RunStarted):
            self._current = event.wall_time == self.session
            self.supervisor = Supervisor(self.supervisor.world, latest=self.supervisor.latest)
        actions = self.supervisor.feed(event)
        return actions if self._current else []

    async def _act(self, actions: list[Action]) -> Ending | None:
        for action in actions:
            match action:
                case Finish():
                    return Ending("finished", [])
                case Stopped():
                    return Ending("stopped", [])
                case Fail(cause):
                    await self.platform.cancel_all(self.spec.run_id)
                    return Ending("failed", [cause])
                case Replace(rank, attempt):
                    if await lease.take(self.channel, self.keys.claim(rank, attempt), f"{self.now():.3f}"):
                        await self._replace(rank, attempt)
                    else:  # its own successor waits to be told where to go on
                        with contextlib.suppress(KeyExists):
                            await self.channel.put(self.keys.hand(rank, attempt), [RECOVER], create=True)
        return None

    async def _replace(self, rank: int, attempt: int) -> None:
        """Starts a replacement; where others still take all places, as soon as there is one."""
        tries = ROOM_TRIES
        while True:
            try:
                return await self._invoke(rank, attempt, "replacement")
            except InvocationRefused as e:
                tries -= 1
                if e.binding != "concurrency" or not tries:
                    raise
            await asyncio.sleep(ROOM_S)

    async def _stop_when_asked(self) -> Ending:
        """First request: stop at a checkpoint; second one, or no answer in time: kill. Either can be resumed."""
        await self.stop_requested.wait()
        try:
            await self.channel.put(self.keys.control, [b"stop"])
            async with asyncio.timeout(STOP_GRACE_S):
                await self.kill_requested.wait()
        except (TimeoutError, ChannelError):
            pass
        await self.platform.cancel_all(self.spec.run_id)
        return Ending("stopped", [])

    async def collect(self, ending: Ending) -> None:
        """Fetches the result of a finished run."""
        try:
            deadline = asyncio.get_running_loop().time() + 30
            received = await self.channel.get(self.keys.result, deadline=deadline)
        except ChannelTimeout:
            ending.status = "failed"
            ending.causes.append("rank 0 ended, but its result is not in the channel")
            return
        ending.arrays, ending.final = decode_state(received.data, key=self.keys.result)
        await together(ending, self.channel, self.keys)

    async def _end(self, ending: Ending) -> None:
        for cause in ending.causes:
            note = Note(t=self.now(), level="error", text=cause)
            self.on_event(note)
            await self.platform.emit(self.spec.run_id, note)
        ended = RunEnded(t=self.ledger.ended_at, status=ending.status, causes=ending.causes)
        await self.platform.emit(self.spec.run_id, ended)
        self.on_event(ended)


async def together(ending: Ending, channel: Channel, keys: Keys) -> None:
    """Puts the weights of a divided model together, one stage after the other: no function could hold them all."""
    final = ending.final
    if final is None or "parts" not in final:
        return
    arrays: Arrays = {}
    bf16: list[str] = []
    for stage in range(final["parts"]):
        received = await channel.get(keys.part(stage), deadline=asyncio.get_running_loop().time() + 30)
        part, notes = decode_state(received.data, key=keys.part(stage))
        arrays |= part
        bf16 += notes.get("bf16", [])
    ending.arrays = arrays
    ending.final = {**final, "weights_sha256": digest(arrays), **({"bf16": bf16} if bf16 else {})}


def describe(spec: RunSpec) -> dict[str, Any]:
    """The configuration as people call it, for reports."""
    c = spec.configuration
    return {
        "pattern": c.pattern, "sync": c.sync, "channel": c.channel, "exchange": c.exchange, "compression": c.compression,
        "workers": c.workers, "aggregators": c.aggregators, "memory_mb": c.memory_mb, "batch_size": c.batch_size,
        "nonaggregator_batch_size": c.nonaggregator_batch_size, "global_batch": c.global_batch,
        "lifetime_s": c.lifetime_s, "checkpoint_every": c.checkpoint_every, "budget_usd": spec.budget_usd,
        **({} if spec.stages is None else {
            "stages": c.stages, "replicas": c.replicas, "micro_batches": c.micro_batches, "schedule": c.schedule,
        }),
        "optimizer": spec.optimizer.target, "loss": spec.loss.target, "seed": spec.seed, "dtype": spec.dtype,
    }  # fmt: skip
