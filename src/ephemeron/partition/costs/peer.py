"""What stands for a device while links are measured: takes messages, and times messages to another peer when it is asked to."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from typing import Any

from ephemeron.communication.rpc import Client


def wait_s(nbytes: int, latency_s: float, bandwidth_bytes_s: float | None) -> float:
    """How long a throttled link holds back a message; None: no limit."""
    return latency_s + (nbytes / bandwidth_bytes_s if bandwidth_bytes_s else 0.0)


class LinkPeer:
    """Answers `take` (a message) and `send` (time messages to another peer).

    Args:
        token: shared by all peers.
        clock: seconds.
    """

    def __init__(self, token: str, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._token, self._clock = token, clock

    async def answer(
        self, method: str, params: dict[str, Any], buffers: list[memoryview]
    ) -> tuple[dict[str, Any], Sequence[Any]]:
        if method == "take":
            hold = wait_s(sum(len(b) for b in buffers), params["latency_s"], params["bandwidth_bytes_s"])
            if hold > 0:
                await asyncio.sleep(hold)
            return {}, ()
        if method == "send":
            return {"samples": await self._send(**params)}, ()
        raise ValueError(f"a peer knows no {method}")

    async def _send(
        self, host: str, port: int, sizes: list[int], repeats: int, latency_s: float, bandwidth_bytes_s: float | None
    ) -> list[list[float]]:
        client = await Client.connect_tcp(host, port, token=self._token)
        limit = {"latency_s": latency_s, "bandwidth_bytes_s": bandwidth_bytes_s}
        try:
            made: list[list[float]] = [[] for _ in sizes]
            for turn in range(repeats + 1):  # the first warms up: fresh memory, slow start
                for i, nbytes in enumerate(sizes):
                    message = bytes(nbytes)
                    begun = self._clock()
                    await client.call("take", limit, [message] if nbytes else [])
                    if turn:
                        made[i].append(self._clock() - begun)
            return made
        finally:
            await client.close()
