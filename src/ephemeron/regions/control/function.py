"""The control functions as entries: `geo-scheduling` and `geo-addressing`. Each serves the requests in its store until there are none for a while.

They are started on demand by clients (`client.ControlClient`), and so may end at any time: their state is in the store.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ephemeron.config.typed import Positive
from ephemeron.errors import EphemeronError, UserError
from ephemeron.functions.context import Context
from ephemeron.regions.control.addressing import LEASE_S, AddressTable
from ephemeron.regions.control.machine import ControlMachine
from ephemeron.regions.control.scheduling import Scheduler
from ephemeron.regions.control.store import ControlStore, StoredState

_log = logging.getLogger(__name__)

_FIRST_POLL_S, _LONGEST_POLL_S, _GROWTH = 0.02, 0.25, 1.5
_LAST_S = 5.0
"""Before the time limit, when no more requests are taken."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlRequest:
    """Arguments of the entries."""

    idle_s: Positive = 30.0
    """Time without a request after which the function ends."""
    lease_s: Positive = LEASE_S
    """Of addresses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlResult:
    """Result of the entries."""

    outcome: str
    """`idle`, `time limit`, `duplicate` or `replaced`."""
    served: int
    """Requests that this invocation has answered."""


async def run_geo_scheduling(ctx: Context, request: ControlRequest) -> ControlResult:
    """The entry `geo-scheduling`: plans the devices of regions."""
    return await serve_control(ctx, request, Scheduler(), "scheduling")


async def run_geo_addressing(ctx: Context, request: ControlRequest) -> ControlResult:
    """The entry `geo-addressing`: keeps the table of communicators' addresses."""
    return await serve_control(ctx, request, AddressTable(lease_s=request.lease_s), "addressing")


async def serve_control(ctx: Context, request: ControlRequest, machine: ControlMachine, function: str) -> ControlResult:
    """Serves the requests of one control function."""
    loop, call = asyncio.get_running_loop(), ctx.call
    store = ControlStore(ctx.channel, run=call.run, function=function, owner=ctx.invocation, key=call.key)
    if not await store.create("start", call.attempt, {"invocation": ctx.invocation}):
        return ControlResult(outcome="duplicate", served=0)
    server = _Server(store, machine, attempt=call.attempt)
    await server.take_over(loop.time())
    idle_since, pause = loop.time(), _FIRST_POLL_S
    outcome = ""
    while not outcome:
        served = await server.serve(loop.time())
        if served is None or await store.latest("attempt") > call.attempt:
            return ControlResult(outcome="replaced", served=server.served)
        if served:
            idle_since, pause = loop.time(), _FIRST_POLL_S
        if loop.time() > ctx.deadline - min(_LAST_S, (ctx.deadline - idle_since) / 4):
            outcome = "time limit"
        elif loop.time() - idle_since > request.idle_s:
            outcome = "idle"
        else:
            await asyncio.sleep(pause)
            pause = min(pause * _GROWTH, _LONGEST_POLL_S)
    await store.create("ended", call.attempt, {"outcome": outcome})
    return ControlResult(outcome=outcome, served=server.served)


class _Server:
    """One attempt: applies requests to the machine, and stores each change before it is answered."""

    def __init__(self, store: ControlStore, machine: ControlMachine, *, attempt: int) -> None:
        self._store, self._machine, self._attempt = store, machine, attempt
        self._answers: dict[str, Mapping[str, Any]] = {}
        self.served = 0

    async def take_over(self, now: float) -> None:
        """Goes on from what earlier attempts have stored."""
        stored = await self._store.load()
        if stored is not None:
            self._machine.restore(stored.machine, now)
            self._answers = dict(stored.answers)
            for id, answer in self._answers.items():
                await self._store.create("answer", id, answer)

    async def serve(self, now: float) -> int | None:
        """Answers all new requests; returns how many. None: another attempt has stored a change."""
        waiting = await self._store.names("request")
        new = {id: asked for id in waiting if id not in self._answers and (asked := await self._store.read("request", id)) is not None}
        if not new:
            return 0
        taken = [id for id in self._answers if id not in waiting]
        for id in taken:
            del self._answers[id]
        for id, asked in new.items():
            self._answers[id] = self._answer(asked, now)
        if not await self._store.store(StoredState(attempt=self._attempt, machine=self._machine.state(), answers=self._answers)):
            return None
        for id in new:
            await self._store.create("answer", id, self._answers[id])
        await self._store.delete("answer", *taken)
        self.served += len(new)
        return len(new)

    def _answer(self, asked: Mapping[str, Any], now: float) -> Mapping[str, Any]:
        try:
            return {"answer": self._machine.apply(asked, now)}
        except UserError as e:
            return {"refused": str(e)}
        except EphemeronError as e:
            _log.exception("a request failed")
            return {"failed": str(e)}
