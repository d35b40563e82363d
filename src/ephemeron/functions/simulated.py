"""Functions in virtual time: the same worker code, with modelled compute, network, starts, lifetimes and faults.

Gradients are real if the trainer computes them; only the clock is simulated. All randomness is drawn from seeds,
so the same run gives identical events. Memory is not measured.

Run everything inside `ephemeron.functions.simulation.run`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import math
import random
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn, TypeVar

from ephemeron import logs
from ephemeron.communication.channels.base import Buffer, Channel, Received, Wrapper
from ephemeron.communication.channels.parameter_server import MemoryParameterServer
from ephemeron.communication.channels.wrappers import Throttled
from ephemeron.communication.direct.memory_transport import MemoryNetwork
from ephemeron.errors import InvocationRefused
from ephemeron.events import Event, Invoked, to_json
from ephemeron.functions.base import Call, Invocation, Limits, Outcome, Platform, Reason, ended_event
from ephemeron.functions.context import Context
from ephemeron.functions.entries import Entry, check_entry, known, serve
from ephemeron.functions.validation import check_call
from ephemeron.functions.world import Simulation
from ephemeron.user_code import failure, guarded


class Blackouts(Wrapper):
    """A channel that is not reached for some time: requests and their answers wait until it is over.

    Args:
        inner: the channel.
        times: beginning and end of each blackout, loop time.
    """

    def __init__(self, inner: Channel, times: Sequence[tuple[float, float]]) -> None:
        super().__init__(inner)
        self._times = times

    async def put(self, key: str, buffers: Sequence[Buffer], *, create: bool = False) -> None:
        await self._over()
        await self.inner.put(key, buffers, create=create)
        await self._over()

    async def fetch(self, key: str) -> memoryview | None:
        await self._over()
        data = await self.inner.fetch(key)
        await self._over()
        return data

    async def get(self, key: str, *, deadline: float, expected_at: float | None = None) -> Received:
        await self._over()
        received = await self.inner.get(key, deadline=deadline, expected_at=expected_at)
        waited_s = await self._over()
        return received._replace(waited_s=received.waited_s + waited_s)

    async def delete(self, keys: Iterable[str]) -> None:
        await self._over()
        await self.inner.delete(keys)
        await self._over()

    async def list(self, prefix: str) -> list[str]:
        await self._over()
        found = await self.inner.list(prefix)
        await self._over()
        return found

    async def exists(self, key: str) -> bool:
        await self._over()
        found = await self.inner.exists(key)
        await self._over()
        return found

    async def _over(self) -> float:
        """Waits for the end of a blackout; returns how long."""
        now = asyncio.get_running_loop().time()
        waits = max((end - now for begin, end in self._times if begin <= now < end), default=0.0)
        await asyncio.sleep(waits)
        return waits


T = TypeVar("T")

_log = logging.getLogger(__name__)

MEASURED = (
    "computing is measured as CPU seconds of one thread of this machine, scaled by each function's CPU share; "
    "give [simulation] compute for another machine's"
)


def simulated_limits(world: Simulation) -> Limits:
    """AWS Lambda's limits, with the concurrency of the job's `[simulation]`."""
    return Limits(concurrency=world.concurrency, more="set [simulation] concurrency")


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limits PyTorch to one thread meanwhile: with several, steps depend on the load of the machine."""
    torch = sys.modules.get("torch")
    if torch is None:  # synthetic trainers need none
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class SimulatedPool:
    """Functions that run, and environments that are warm. Platforms of several runs may share one."""

    def __init__(self) -> None:
        self.running = 0
        self._warm: dict[int, int] = {}

    def take_environment(self, memory_mb: int) -> bool:
        """Whether a warm environment was free (and is taken now)."""
        free = self._warm.get(memory_mb, 0)
        self._warm[memory_mb] = max(0, free - 1)
        return free > 0

    def give_environment(self, memory_mb: int) -> None:
        """Keeps an environment for another invocation."""
        self._warm[memory_mb] = self._warm.get(memory_mb, 0) + 1


class SimulatedPlatform(Platform):
    """A cloud made of tasks.

    Args:
        world: latencies, bandwidth, start times, compute.
        entries: added to those of `functions.entries`, or in their place.
        limits: of the cloud.
        seed: of stragglers.
        log: file to which events are appended as JSON lines.
        shared: store that the groups of a run share.
        pool: of the cloud, which further runs may share; None: one of its own.
    """

    name = "simulated"
    overlaps = False
    """Whether functions send pieces of gradients early. All leave when a computation begins, so that runs seem too quick."""
    unenforced: tuple[str, ...] = ("time is virtual: seconds and costs are simulated", "memory quotas are not enforced in the simulator")

    def __init__(
        self,
        world: Simulation,
        *,
        entries: Mapping[str, Entry] | None = None,
        limits: Limits | None = None,
        seed: int = 0,
        log: Path | None = None,
        pool: SimulatedPool | None = None,
        shared: Channel | None = None,
    ) -> None:
        self.world, self.entries, self.seed = world, entries or {}, seed
        self.limits = limits or simulated_limits(world)
        if world.compute is None:
            self.unenforced = (*self.unenforced, MEASURED)
        self.store: Channel = MemoryParameterServer()
        self.shared = shared
        self.network = MemoryNetwork(
            latency_s=world.direct_latency_s,
            bandwidth_mb_s=world.direct_bandwidth_mb_s or world.bandwidth_mb_s,
            setup_s=world.direct_setup_s,
            fails=self._cannot_connect,
        )
        self._log = log.open("a", buffering=1) if log is not None else None
        self._events: list[Event] = []
        self._new = asyncio.Event()
        self._running: dict[str, SimulatedInvocation] = {}
        self._started = 0
        self.pool = SimulatedPool() if pool is None else pool

    async def invoke(self, call: Call) -> SimulatedInvocation:
        self._refuse(call)
        twice, call = call.duplicate, dataclasses.replace(call, duplicate=False)
        invocation = self._start(call, call.reason)
        if twice:
            self._start(call, "duplicate")
        return invocation

    def _cannot_connect(self, ranks: frozenset[int]) -> bool:
        return random.Random(f"{self.seed}/pair/{sorted(ranks)}").random() < self.world.direct_failure

    def _refuse(self, call: Call) -> None:
        limits = self.limits
        check_entry(call.entry, known().keys() | self.entries.keys())
        check_call(call, limits)
        if self.pool.running >= limits.concurrency:
            raise InvocationRefused(f"{limits.concurrency} functions run already: the concurrency limit")

    def _start(self, call: Call, reason: Reason) -> SimulatedInvocation:
        self._started += 1
        invocation = SimulatedInvocation(self, f"i{self._started}", call)
        self._running[invocation.id] = invocation
        self.pool.running += 1
        self.record(Invoked(t=self.run_time(call), rank=call.rank, attempt=call.attempt, invocation=invocation.id, reason=reason))
        return invocation

    def ended(self, invocation: SimulatedInvocation, outcome: Outcome, *, reusable: bool) -> None:
        """An invocation is over: its bill is an event, its environment may be used again."""
        del self._running[invocation.id]
        self.pool.running -= 1
        if reusable:
            self.pool.give_environment(invocation.call.memory_mb)
        self.record(ended_event(invocation.call, invocation.id, outcome, t=self.run_time(invocation.call)))

    @staticmethod
    def run_time(call: Call) -> float:
        return asyncio.get_running_loop().time() - call.origin

    def record(self, event: Event) -> None:
        self._events.append(event)
        if self._log is not None:
            self._log.write(to_json(event) + "\n")
        self._new.set()

    async def emit(self, run: str, event: Event) -> None:
        self.record(event)

    async def events(self, run: str) -> AsyncIterator[Event]:
        seen = 0
        while True:
            while seen < len(self._events):
                seen += 1
                yield self._events[seen - 1]
            self._new.clear()
            await self._new.wait()

    async def cancel_all(self, run: str) -> None:
        for invocation in list(self._running.values()):
            await invocation.cancel()

    async def close(self) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


class SimulatedInvocation(Invocation):
    """One task, which ends when a function would."""

    def __init__(self, platform: SimulatedPlatform, id: str, call: Call) -> None:
        self.id, self.call = id, call
        self._platform = platform
        self._why: Outcome | None = None
        self._body: asyncio.Task[Mapping[str, object]] | None = None
        self._task = asyncio.get_running_loop().create_task(self._live())

    async def wait(self) -> Outcome:
        return await asyncio.shield(self._task)

    async def cancel(self) -> None:
        self._kill(Outcome(status="cancelled"))
        await asyncio.wait([self._task])

    def _kill(self, outcome: Outcome) -> None:
        if self._why is None and not self._task.done():
            self._why = outcome
            if self._body is not None:
                self._body.cancel()

    def _die(self) -> NoReturn:
        self._kill(Outcome(status="lost", error="killed by an injected fault"))
        raise asyncio.CancelledError

    async def _live(self) -> Outcome:
        platform, loop = self._platform, asyncio.get_running_loop()
        accepted = loop.time()
        warm = platform.pool.take_environment(self.call.memory_mb)
        if self._why is None:
            self._body = loop.create_task(self._run(cold=not warm))
            await asyncio.wait([self._body])
        outcome = self._why or self._outcome(self._body)
        billed = math.ceil((loop.time() - accepted) * 1000 - 1e-6) / 1000
        final = Outcome(
            status=outcome.status, value=outcome.value, error=outcome.error, billed_s=billed, gb_seconds=billed * self.call.memory_mb / 1024
        )
        platform.ended(self, final, reusable=final.status == "ok")
        return final

    def _outcome(self, body: asyncio.Task[Mapping[str, object]] | None) -> Outcome:
        if body is None or body.cancelled():
            return Outcome(status="cancelled")
        error = body.exception()
        if isinstance(error, TimeoutError) and asyncio.get_running_loop().time() >= self._deadline:
            return Outcome(status="timed_out", error=f"killed after {self.call.lifetime_s} s")
        if error is not None:
            return Outcome(status="error", error="\n".join(failure(error)))
        return Outcome(status="ok", value=body.result())

    async def _run(self, *, cold: bool) -> Mapping[str, object]:
        platform, call, world, loop = self._platform, self.call, self._platform.world, asyncio.get_running_loop()
        await asyncio.sleep(world.cold_start_s if cold else world.warm_start_s)
        self._deadline = loop.time() + call.lifetime_s
        context = Context(
            call=call,
            invocation=self.id,
            channel=Throttled(platform.store, latency_s=world.latency_s, bandwidth_mb_s=world.bandwidth_mb_s),
            shared=self._shared(),
            emit=platform.record,
            invoke=self._invoke,
            die=self._die,
            cold=cold,
            scratch=None,
            own_process=False,
            transports=lambda: [platform.network.transport(call.rank)],
            compute=SimulatedCompute(world, call, platform.limits, seed=f"{platform.seed}/{call.rank}/{call.attempt}"),
            origin=call.origin,
            deadline=self._deadline,
            overlaps=platform.overlaps,
        )
        with logs.context(**call.log_fields):
            _log.debug("invocation %s begins at %.3f s", self.id, loop.time())
            async with asyncio.timeout_at(self._deadline):
                return await serve(context, platform.entries.get(call.entry))

    def _shared(self) -> Channel | None:
        """The store that regions share, as this one reaches it."""
        store, world, call = self._platform.shared, self._platform.world, self.call
        if store is None:
            return None
        latency_s = world.latency_s if world.region_latency_s is None else world.region_latency_s
        reached = Throttled(store, latency_s=latency_s, bandwidth_mb_s=world.region_bandwidth_mb_s or world.bandwidth_mb_s)
        times = [
            (call.origin + dark.start_s, call.origin + dark.start_s + dark.seconds)
            for dark in world.region_blackouts
            if call.run.endswith(f"-{dark.region}")
        ]
        return Blackouts(reached, times) if times else reached

    async def _invoke(self, call: Call) -> None:
        await self._platform.invoke(call)


class SimulatedCompute:
    """Runs the work at once and advances the clock by the time of the model."""

    def __init__(self, world: Simulation, call: Call, limits: Limits, *, seed: str) -> None:
        self._world, self._memory_mb = world, call.memory_mb
        self._vcpus = limits.vcpus(call.memory_mb)
        self._random = random.Random(seed)
        self._slow = [
            (call.origin + slow.start_s, call.origin + slow.start_s + slow.seconds, slow.factor)
            for slow in world.region_slowdowns
            if call.run.endswith(f"-{slow.region}")
        ]

    async def __call__(self, work: Callable[[], T], *, samples: float, batches: int = 1) -> T:
        began = time.thread_time()
        with one_thread(), guarded():
            result = work()
        await asyncio.sleep(self._seconds(samples, batches, time.thread_time() - began))
        return result

    def _seconds(self, samples: float, batches: int, measured_s: float) -> float:
        model = self._world.compute
        if model is None:
            seconds = measured_s / self._vcpus
        elif samples > 0:
            seconds = batches * model.seconds(samples / batches, self._memory_mb)
        else:
            seconds = 0.0
        now = asyncio.get_running_loop().time() if self._slow else 0.0
        seconds *= math.prod(factor for begin, end, factor in self._slow if begin <= now < end)
        sigma = self._world.straggler_sigma
        return seconds * self._random.lognormvariate(0.0, sigma) if sigma > 0 and seconds > 0 else seconds
