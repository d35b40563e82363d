"""Who runs a program: an object beside its temporary tiles names the client, and the queue from which functions take its tasks.

It is put before the first task and removed with the temporary tiles, so it costs one request. A client that was killed leaves it, and
`remains` finds the queue by it.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

import psutil

from ephemeron.blocking import run as blocking
from ephemeron.communication.channels.base import Channel
from ephemeron.config.typed import Typed, build, plain
from ephemeron.errors import DamagedObject, EphemeronError
from ephemeron.executor import FunctionExecutor
from ephemeron.linalg.matrices import tile_store

TEMPORARY = "-temporary"
"""The temporary tiles of program P are below `P-temporary/`."""
COMMAND = "command"
"""Matrices that `ephemeron linalg` has read from files are `command-DIGEST-N`, and go when the command has ended."""
CLAIM = "running."
"""The claim of queue Q is `P-temporary/running.Q`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramClaim(Typed):
    """A client that runs a program, or has tried to."""

    queue: str
    """Name."""
    channel: str
    """Address of the queue's channel; `memory` where functions are simulated."""
    host: str
    """Name of the client's machine."""
    process: int
    """Number of the client's process there."""
    process_began: float
    """Its start, in seconds since 1970: process numbers are used again."""
    began: float
    """Start of the program, in seconds since 1970."""
    failed: bool = False
    """Whether the client has seen the program fail."""

    @property
    def is_here(self) -> bool:
        """Whether the client is, or was, on this machine."""
        return self.host == platform.node()

    @property
    def client_lives(self) -> bool:
        """Whether the client is on this machine, and its process lives."""
        if not self.is_here:
            return False
        try:
            return bool(abs(psutil.Process(self.process).create_time() - self.process_began) < 1.0)
        except psutil.Error:
            return False


@contextlib.contextmanager
def claimed(store: str, temporaries: str, executor: FunctionExecutor) -> Iterator[None]:
    """Claims a program while its client waits for it. The claim is put before the first task is published, goes with the temporary tiles,
    and stays where the program fails: its tiles stay, too, so that it can be resumed.

    Args:
        store: address of the matrices.
        temporaries: prefix of the temporary tiles.
        executor: runs the program.
    """
    channel, queue = executor.queue
    claim = ProgramClaim(
        queue=queue,
        channel=channel,
        host=platform.node(),
        process=os.getpid(),
        process_began=psutil.Process().create_time(),
        began=time.time(),
    )

    async def put(claim: ProgramClaim) -> None:
        async with tile_store.opened(store) as channel:
            await channel.put(f"{temporaries}/{CLAIM}{claim.queue}", [json.dumps(plain(claim)).encode()])

    blocking(lambda interrupts: put(claim))
    try:
        yield
    except BaseException:
        with contextlib.suppress(EphemeronError):
            blocking(lambda interrupts: put(replace(claim, failed=True)))
        raise


async def claims_of(store: Channel, temporaries: str) -> list[ProgramClaim]:
    """All claims on a program. A damaged one names no client, and goes with the temporary tiles."""
    found = []
    for key in await store.list(f"{temporaries}/{CLAIM}"):
        with contextlib.suppress(DamagedObject):
            if (data := await store.fetch(key)) is not None:
                found.append(build(ProgramClaim, json.loads(bytes(data)), where=key))
    return found
