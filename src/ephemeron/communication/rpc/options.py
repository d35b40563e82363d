"""Options of a connection, at either end."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ephemeron.communication.rpc import compression, memory
from ephemeron.communication.rpc.auth import Offer
from ephemeron.communication.rpc.frame import FrameLimits, Receive
from ephemeron.communication.rpc.frame_socket import FrameSocket
from ephemeron.communication.rpc.memory import POOL, BufferPool
from ephemeron.communication.rpc.session import Session
from ephemeron.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options of one end; the two ends may differ."""

    limits: FrameLimits = field(default_factory=FrameLimits)
    """Limits of received frames."""
    max_calls: int = 1024
    """Concurrent calls of one client. A client waits; one that does not is disconnected."""
    receive: Receive = Receive.VIEWS
    """Type of the buffers of requests; for servers."""
    compress: bool = True
    """Whether data may be compressed where the link is slower than the codec; TCP only."""
    shared: bool = True
    """A server's: whether Unix clients that ask for it may share memory."""
    shared_bytes: int = memory.LIMIT_BYTES
    """Memory that this end may share with the other end of one connection, for what it sends."""
    pool: BufferPool = field(default_factory=lambda: POOL)
    """Memory for what arrives."""
    clock: Callable[[], float] = time.monotonic
    """Seconds; measures the link and the codec."""

    def __post_init__(self) -> None:
        for name, value, least in (
            ("max_calls", self.max_calls, 1),
            ("limits.max_frame", self.limits.max_frame, 1),
            ("limits.max_buffers", self.limits.max_buffers, 1),
            ("limits.max_tag", self.limits.max_tag, 64 << 10),
        ):
            if value < least:
                raise JobError(f"rpc: {name} = {value} is too small", remedy=f"give at least {least}")

    def wire(self, sock: socket.socket) -> FrameSocket:
        """Frames through a connected socket."""
        return FrameSocket(sock, limits=self.limits, pool=self.pool, clock=self.clock, shared_bytes=self.shared_bytes)

    def offer(self, *, shared: bool) -> Offer:
        """Offer to the other end."""
        codecs = compression.offered() if self.compress else ()
        ready = shared and self.shared and memory.available()
        return Offer(max_calls=self.max_calls, codecs=codecs, shared=ready)

    def session(self, theirs: Offer, *, client: bool) -> Session:
        """The tables of a connection whose other end has offered that."""
        return Session(client=client, max_calls=theirs.max_calls if client else self.max_calls, receive=self.receive)
