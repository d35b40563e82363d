"""Objects of a control function in a channel: attempts, a state in versions, requests and answers. All are create-only.

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

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.signing import SigningKey
from ephemeron.config.typed import build, plain
from ephemeron.errors import KeyExists


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
