"""The part of a probe that measures direct links between two functions that run at once.

The first function measures. The second one answers, and plays all other members when it is measured how long it takes to connect
to several: it announces them, tells the first one, which then joins. What both say to each other goes over a mesh of its own.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from enum import IntEnum

from ephemeron.communication.channels.run_channel import RunChannel
from ephemeron.communication.direct import Head, Kind, LinkFailed, Mesh, kernel_transports
from ephemeron.communication.keys import Keys
from ephemeron.functions.context import Context
from ephemeron.training.collectives.direct_messages import PIECE_BYTES
from ephemeron.training.worker.direct_exchange import token_of
from ephemeron.training.worker.probe_messages import LinkProbe, LinkResult
from ephemeron.units import MB

LINK_TIMEOUT_S = 20.0
LOOKS_S = 0.0005
"""Seconds between two looks at whether members are connected."""
SMALL = bytes(1024)
MESSAGES = 200
"""Small messages whose latency is measured."""
PIECE = bytes(PIECE_BYTES)


class _Part(IntEnum):
    """What a message of a probe is."""

    SMALL = 0
    ANSWER = 1
    EXCHANGE = 2
    """Both send `LinkProbe.mb` now."""
    PIECE = 3
    GO_ON = 4


async def measure_links(ctx: Context, wanted: LinkProbe) -> LinkResult | None:
    """Measures as the first function, or answers as the second one, which has no result.

    Raises:
        LinkFailed: the two functions cannot connect.
    """
    probe = _LinkProbe(ctx, wanted)
    try:
        async with asyncio.timeout(LINK_TIMEOUT_S):
            await probe.meet()
            return await (probe.measure() if wanted.first else probe.serve())
    except TimeoutError:
        raise LinkFailed("two functions that probe their direct link do not connect, or do not answer") from None
    finally:
        await probe.close()


class _LinkProbe:
    """One of the two functions."""

    def __init__(self, ctx: Context, wanted: LinkProbe) -> None:
        self._ctx, self._wanted = ctx, wanted
        self._store = RunChannel(ctx.channel, owner=ctx.invocation)
        self._other = 1 if wanted.first else 0
        self._open: list[Mesh] = []
        self._heard: asyncio.Queue[_Part] = asyncio.Queue()
        self._landing = memoryview(bytearray(PIECE_BYTES))
        self._pieces = math.ceil(wanted.mb * MB / PIECE_BYTES)

    async def meet(self) -> None:
        """Connects the two functions."""
        self._mesh = await self._join(0, 1 - self._other, 2)
        self._mesh.handle(Kind.PROBE, self._on_message, lambda rank, head, nbytes: self._landing[:nbytes])
        await _connected(self._mesh, [self._other])

    async def measure(self) -> LinkResult:
        """All that the first function measures."""
        now = asyncio.get_running_loop().time
        setups = []
        for round_, others in self._rounds():
            await self._hear(_Part.GO_ON)
            began = now()
            mesh = await self._join(round_, 0, others + 1)
            await _connected(mesh, range(1, others + 1))
            setups.append(now() - began)
            self._tell(_Part.GO_ON)
        latencies, exchanges, cpu = [], [], []
        for _ in range(MESSAGES):
            began = now()
            self._tell(_Part.SMALL, SMALL)
            await self._hear(_Part.ANSWER)
            latencies.append((now() - began) / 2)
        for _ in range(self._wanted.repeats):
            began, worked = now(), time.process_time()
            self._tell(_Part.EXCHANGE)
            await self._exchange()
            exchanges.append(now() - began)
            cpu.append(time.process_time() - worked)
        self._tell(_Part.GO_ON)
        await self._mesh.drained()
        return LinkResult(
            transport=self._mesh.transport_of(self._other),
            one_link_s=setups[0],
            all_links_s=setups[1],
            latency_s=tuple(latencies),
            exchange_s=tuple(exchanges),
            exchange_cpu_s=tuple(cpu),
        )

    async def serve(self) -> None:
        """Answers until the first function has measured everything."""
        for round_, others in self._rounds():
            members = range(1, others + 1)
            meshes = [await self._join(round_, rank, others + 1) for rank in members]
            for mesh in meshes:
                await _connected(mesh, [rank for rank in members if rank != mesh.rank])
            self._tell(_Part.GO_ON)
            await self._hear(_Part.GO_ON)
        while await self._heard.get() == _Part.EXCHANGE:
            await self._exchange()
        await self._mesh.drained()

    async def close(self) -> None:
        """Leaves all meshes."""
        for mesh in self._open:
            await mesh.close()

    def _rounds(self) -> list[tuple[int, int]]:
        """Number of each generation in which connecting is measured, and how many others there are."""
        return [(1, 1), (2, self._wanted.others)]

    async def _join(self, round_: int, rank: int, ranks: int) -> Mesh:
        keys = Keys(self._ctx.call.run, generation=self._wanted.generation + round_)
        transports = kernel_transports() if self._ctx.transports is None else self._ctx.transports()
        mesh = await Mesh.join(
            store=self._store,
            rank=rank,
            attempt=0,
            ranks=ranks,
            keys=keys,
            token=token_of(self._ctx.call.key, keys.run),
            transports=transports,
        )
        self._open.append(mesh)
        return mesh

    async def _exchange(self) -> None:
        for _ in range(self._pieces):
            self._tell(_Part.PIECE, PIECE)
        for _ in range(self._pieces):
            await self._hear(_Part.PIECE)
        await self._mesh.drained()

    def _on_message(self, rank: int, head: Head, body: memoryview) -> None:
        if head.part == _Part.SMALL:
            self._tell(_Part.ANSWER, SMALL)
        else:
            self._heard.put_nowait(_Part(head.part))

    async def _hear(self, part: _Part) -> None:
        heard = await self._heard.get()
        if heard != part:
            raise LinkFailed(f"expected {part.name} of the other function that probes, heard {heard.name}")

    def _tell(self, part: _Part, body: bytes = b"") -> None:
        if not self._mesh.send(self._other, Kind.PROBE, part=part, buffers=[body] if body else ()):
            raise LinkFailed("the connection of two functions that probe it was lost")


async def _connected(mesh: Mesh, ranks: Sequence[int]) -> None:
    """Waits until a member has connections of its own to some ranks."""
    while any(mesh.transport_of(rank) in ("", "forwarded", "store") for rank in ranks):  # noqa: ASYNC110 - a route that stops being forwarded is no event
        await asyncio.sleep(LOOKS_S)
