"""Names of a store's objects in a channel, and how its shards are found there.

    NAME/shard-0000/attempt-00000002            claim of a process: its address. The highest attempt is the shard
    NAME/shard-0000/snapshot-00000002-000001    head of a snapshot of an attempt, written after its parts, ...-part-000000
    NAME/shard-0000/log-00000002-0000000001     changes since then
    NAME/shard-0000/final-00000002              the attempt has handed over: all it acknowledged is in snapshot and log

Attempts are create-only objects: of two processes that claim the same one, one has it.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
from dataclasses import dataclass
from typing import Annotated

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.channels.retrying import RetryPolicy
from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.config.typed import AtLeast, Within, build, plain
from ephemeron.errors import DamagedObject, JobError, KeyExists, ServiceUnreachable

_log = logging.getLogger(__name__)

NAME = re.compile(r"[A-Za-z0-9._-]+(/[A-Za-z0-9._-]+)*")
_POLL_S = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """Address of a process that is a shard."""

    host: str
    port: Annotated[int, Within(1, 65535)]
    shards: Annotated[int, AtLeast(1)]


class ShardPlace:
    """Objects of one shard.

    Args:
        channel: framed; see `framed`.
        name: of the store; parts of letters, digits, dots, dashes and underscores, joined by slashes.
    """

    def __init__(self, channel: Channel, name: str, shard: int) -> None:
        if NAME.fullmatch(name) is None:
            raise JobError(f"name {name!r} of a sparse store", remedy="use letters, digits, dots, dashes and underscores")
        self.channel, self.name, self.shard = channel, name, shard
        self._prefix = f"{name}/shard-{shard:04d}/"

    def attempt(self, attempt: int) -> str:
        """Key of a claim."""
        return f"{self._prefix}attempt-{attempt:08d}"

    def snapshot(self, attempt: int, number: int) -> str:
        """Key of a snapshot's head; its parts' keys begin with it."""
        return f"{self._prefix}snapshot-{attempt:08d}-{number:06d}"

    def log(self, attempt: int, number: int) -> str:
        """Key of an object of the log."""
        return f"{self._prefix}log-{attempt:08d}-{number:010d}"

    def final(self, attempt: int) -> str:
        """Key of the end of an attempt."""
        return f"{self._prefix}final-{attempt:08d}"

    async def last_attempt(self) -> int:
        """The highest attempt; 0: there is none."""
        keys = await self.channel.list(f"{self._prefix}attempt-")
        return int(keys[-1].rpartition("-")[2]) if keys else 0

    async def claim(self, attempt: int, claim: Claim) -> bool:
        """Takes an attempt; False: another process has it."""
        try:
            await self.channel.put(self.attempt(attempt), [json.dumps(plain(claim)).encode()], create=True)
        except KeyExists:
            return False
        return True

    async def read_claim(self, attempt: int) -> Claim | None:
        """The process of an attempt; None: it cannot be read. The next process claims the next attempt."""
        try:
            data = await self.channel.fetch(self.attempt(attempt))
        except DamagedObject as e:
            _log.warning("the address of shard %d cannot be read: %s", self.shard, e)
            return None
        return None if data is None else build(Claim, json.loads(bytes(data)), where=self.attempt(attempt))

    async def snapshots(self) -> list[tuple[int, int]]:
        """Attempt and number of all snapshots that are whole, in their order."""
        keys = await self.channel.list(f"{self._prefix}snapshot-")
        parts = [key.removeprefix(f"{self._prefix}snapshot-").split("-") for key in keys]
        return sorted((int(part[0]), int(part[1])) for part in parts if len(part) == 2)

    async def logged(self) -> list[tuple[int, int]]:
        """Attempt and number of all objects of the log, in their order."""
        prefix = f"{self._prefix}log-"
        return sorted((int(a), int(n)) for a, n in (key[len(prefix) :].split("-") for key in await self.channel.list(prefix)))

    async def keys(self, kind: str) -> list[str]:
        """All keys of a kind: `attempt`, `snapshot`, `log` or `final`."""
        return await self.channel.list(f"{self._prefix}{kind}-")


def framed(channel: Channel, *, owner: str, retry: RetryPolicy | None = None) -> RunChannel:
    """A channel as a store uses it: every object with identity and checksum, requests repeated through outages."""
    return RunChannel(channel, owner=owner, retry=retry, put_again=lambda key: False)


class Directory:
    """Finds the shards of a store in its channel; `locate` is what `SparseStore.connect` takes.

    Args:
        channel: of the store.
        name: of the store.
    """

    def __init__(self, channel: Channel, name: str) -> None:
        self._channel, self._name = channel, name

    async def locate(self, shard: int) -> tuple[str, int]:
        """Address of a shard's highest attempt.

        Raises:
            ConnectionError: it has none yet.
        """
        place = ShardPlace(self._channel, self._name, shard)
        attempt = await place.last_attempt()
        claim = await place.read_claim(attempt) if attempt else None
        if claim is None:
            raise ConnectionError(f"no process has claimed shard {shard} of {self._name}")
        return claim.host, claim.port

    async def shards(self, *, timeout_s: float = 60.0) -> int:
        """Number of shards, once the first one has been claimed.

        Raises:
            ServiceUnreachable: none has been, in that time.
        """
        place = ShardPlace(self._channel, self._name, 0)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        while True:
            attempt = await place.last_attempt()
            claim = await place.read_claim(attempt) if attempt else None
            if claim is not None:
                return claim.shards
            if loop.time() >= deadline:
                raise ServiceUnreachable(f"no shard of the sparse store {self._name!r} has started within {timeout_s:g} s")
            await asyncio.sleep(_POLL_S)
