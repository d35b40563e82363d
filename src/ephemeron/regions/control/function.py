"""The control functions as entries: `geo-scheduling` and `geo-addressing`. Each serves the requests in its store until there are none for a while.

They are started on demand by clients (`client.ControlClient`), and so may end at any time: their state is in the store.

Objects of a control function in a channel: attempts, a state in versions, requests and answers. All are create-only.

    RUN.geo/FUNCTION/attempt/N      claim of the client that starts attempt N
    RUN.geo/FUNCTION/start/N        claim of the invocation that is attempt N: a call that is delivered twice is served once
    RUN.geo/FUNCTION/ended/N        attempt N serves no more requests
    RUN.geo/FUNCTION/state/V        state after the V-th change, with the answers that are not taken yet
    RUN.geo/FUNCTION/request/ID     request of a client, deleted by it when it has the answer
    RUN.geo/FUNCTION/answer/ID

A change is there with its state or not at all. Of two attempts that both run, one fails to create the next version, and ends: it has been replaced.
So a function may die, or go on unnoticed, at any point.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.signing import SigningKey
from ephemeron.config.typed import Positive, build, plain
from ephemeron.errors import EphemeronError, KeyExists, UserError
from ephemeron.functions.context import Context
from ephemeron.regions.control.addressing import LEASE_S, AddressTable, ControlMachine
from ephemeron.regions.control.scheduling import Scheduler

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


# -- objects of a control function in a channel -------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredState:
    """Content of a version."""

    attempt: int
    """That stored it."""
    machine: Mapping[str, Any] = field(default_factory=dict)
    answers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """By request."""


class ControlStore:
    """Objects of one control function.

    Args:
        channel: that clients and the function reach.
        run: of the control function.
        function: its name.
        owner: name of this party, unlike that of every other.
        key: of the run, with which objects are signed; "": they are not.
    """

    def __init__(self, channel: Channel, *, run: str, function: str, owner: str, key: str = "") -> None:
        signing = SigningKey.from_text(key) if key else None
        self._channel = RunChannel(channel, owner=owner, signing=signing, signs=lambda name: True)
        self._prefix = f"{run}.geo/{function}/"
        self._version = 0

    async def create(self, kind: str, name: object, value: Mapping[str, Any]) -> bool:
        """Creates an object; False: it exists."""
        try:
            await self._channel.put(self._key(kind, name), [json.dumps(value).encode()], create=True)
        except KeyExists:
            return False
        return True

    async def read(self, kind: str, name: object) -> dict[str, Any] | None:
        """Content of an object; None: it is not there."""
        data = await self._channel.fetch(self._key(kind, name))
        if data is None:
            return None
        found: dict[str, Any] = json.loads(bytes(data))
        return found

    async def names(self, kind: str) -> list[str]:
        """Names of all objects of a kind."""
        prefix = f"{self._prefix}{kind}/"
        return [key.removeprefix(prefix) for key in await self._channel.list(prefix)]

    async def delete(self, kind: str, *names: object) -> None:
        """Deletes objects of a kind."""
        await self._channel.delete([self._key(kind, name) for name in names])

    async def latest(self, kind: str) -> int:
        """Highest number of a kind; 0: there is none."""
        return max(map(int, await self.names(kind)), default=0)

    async def load(self) -> StoredState | None:
        """The newest state; None: there is none."""
        while True:
            self._version = await self.latest("state")
            if not self._version:
                return None
            data = await self.read("state", self._number(self._version))
            if data is not None:  # else its successor has been stored, and it was deleted
                return build(StoredState, data, where=self._key("state", self._version))

    async def store(self, state: StoredState) -> bool:
        """Stores the next version, and deletes those before the last; False: another attempt has stored it."""
        number = self._version + 1
        if not await self.create("state", self._number(number), plain(state)):
            return False
        if self._version > 1:
            await self.delete("state", self._number(self._version - 1))
        self._version = number
        return True

    async def clear(self) -> None:
        """Deletes everything of this function."""
        await self._channel.delete(await self._channel.list(self._prefix))

    def _number(self, number: int) -> str:
        return f"{number:09d}"

    def _key(self, kind: str, name: object) -> str:
        return f"{self._prefix}{kind}/{name}"
