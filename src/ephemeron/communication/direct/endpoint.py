"""How a member can be reached, and its announcement in the run's store."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.keys import Keys
from ephemeron.config.typed import build, plain
from ephemeron.errors import JobError

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """How one member can be reached. Holds no secret."""

    rank: int
    attempt: int
    machine: str
    """Operating system and network namespace: members with the same one reach each other's Unix sockets."""
    addresses: dict[str, str] = field(default_factory=dict)
    """By transport."""

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps(plain(self)).encode()

    @classmethod
    def of(cls, data: bytes, *, where: str) -> Endpoint | None:
        """The inverse of `to_bytes`; None where it cannot be read."""
        try:
            return build(Endpoint, json.loads(data), where=where)
        except (ValueError, JobError) as e:
            _log.warning("cannot read %s: %s", where, e)
            return None


async def announce(store: Channel, keys: Keys, own: Endpoint) -> dict[int, Endpoint]:
    """Announces a member, and returns the newest announcement of every other rank.

    Raises:
        ChannelUnreachable: the store does not answer.
    """
    await store.put(keys.peer(own.rank, own.attempt), [own.to_bytes()])
    return await _announced(store, keys.peers, own.rank)


async def announce_waiting(store: Channel, keys: Keys, own: Endpoint) -> tuple[dict[int, Endpoint], dict[int, Endpoint]]:
    """Announces a successor that is no member yet, and returns the newest members and waiting successors of other ranks.

    Raises:
        ChannelUnreachable: the store does not answer.
    """
    await store.put(keys.waiting_peer(own.rank, own.attempt), [own.to_bytes()])
    members, waiting = await asyncio.gather(*(_announced(store, at, own.rank) for at in (keys.peers, keys.waiting)))
    return members, {r: e for r, e in waiting.items() if r not in members or e.attempt > members[r].attempt}


async def _announced(store: Channel, prefix: str, own_rank: int) -> dict[int, Endpoint]:
    newest: dict[int, int] = {}
    for key in await store.list(prefix):
        rank, attempt = map(int, key.rpartition("/")[2].split("."))
        if rank != own_rank:
            newest[rank] = max(attempt, newest.get(rank, 0))
    wanted = {rank: f"{prefix}{rank}.{attempt}" for rank, attempt in newest.items()}
    fetched = await asyncio.gather(*(store.fetch(key) for key in wanted.values()))
    found = {
        rank: Endpoint.of(bytes(data), where=key) for (rank, key), data in zip(wanted.items(), fetched, strict=True) if data is not None
    }
    return {rank: endpoint for rank, endpoint in found.items() if endpoint is not None}


def machine() -> str:
    """Name of this operating system and network namespace."""
    parts = []
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/net"))
    return "/".join(parts) or socket.gethostname()
