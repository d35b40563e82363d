"""A device while links are measured: it receives messages, and times messages to another peer on request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from ephemeron.communication.rpc import Client
from ephemeron.config.typed import Count, NonNegative, Positive, build, plain


@dataclass(frozen=True, slots=True, kw_only=True)
class Throttle:
    """Delay that is added to a link."""

    latency_s: NonNegative = 0.0
    bandwidth_bytes_s: Positive | None = None
    """None: no limit."""

    def wait_s(self, nbytes: int) -> float:
        """Seconds for which a message is held back."""
        return self.latency_s + (nbytes / self.bandwidth_bytes_s if self.bandwidth_bytes_s else 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingRequest:
    """Call `send`: time messages to another peer."""

    host: str
    port: int
    sizes: tuple[int, ...]
    """Bytes of messages."""
    repeats: Count
    """Messages of each size."""
    throttle: Throttle


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingReply:
    """Reply to `send`."""

    samples: tuple[tuple[float, ...], ...]
    """Seconds of each message, by size."""


class LinkPeer:
    """RPC handler of `take` (a message) and `send` (time messages to another peer).

    Args:
        token: shared by all peers.
        clock: seconds.
    """

    def __init__(self, token: str, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self._token, self._clock = token, clock

    async def handle(
        self, method: str, params: Mapping[str, object], buffers: Sequence[memoryview]
    ) -> tuple[dict[str, object], Sequence[memoryview]]:
        """Reply to a call.

        Raises:
            ValueError: unknown method.
        """
        if method == "take":
            hold_s = build(Throttle, params, where="take").wait_s(sum(len(b) for b in buffers))
            if hold_s > 0:
                await asyncio.sleep(hold_s)
            return {}, ()
        if method == "send":
            return plain(await self._send(build(TimingRequest, params, where="send"))), ()
        raise ValueError(f"unknown method {method}")

    async def _send(self, request: TimingRequest) -> TimingReply:
        client = await Client.connect_tcp(request.host, request.port, token=self._token)
        throttle = plain(request.throttle)
        try:
            seconds: list[list[float]] = [[] for _ in request.sizes]
            for k in range(request.repeats + 1):  # the first is a warm-up: fresh memory, slow start
                for own, nbytes in zip(seconds, request.sizes, strict=True):
                    message = bytes(nbytes)
                    begun = self._clock()
                    await client.call("take", throttle, [message] if nbytes else [])
                    if k:
                        own.append(self._clock() - begun)
            return TimingReply(samples=tuple(map(tuple, seconds)))
        finally:
            await client.close()
