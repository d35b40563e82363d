"""Connections of strangers: limits on what everything that listens holds for others before they have proved that they may.

A connection counts from its acceptance until its proof (the token; with HTTP, a complete request) or its end. Where an address, or
all of them together, have more, the oldest is closed for the new one. So silent connections shut nobody out: a client that proves
itself within a round trip is done before as many others have come. Each listener has a time limit for the proof, too.
Limits are generous because many functions may share one address (NAT, one machine); proved connections do not count.
"""

from __future__ import annotations

import contextlib
import ipaddress
import itertools
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator

IN_ALL = 512
PER_ADDRESS = 256


class UnprovedConnections:
    """The unproved connections of one listener. Threads may share it.

    Args:
        in_all: connections held at most.
        per_address: of one origin at most; see `origin`.
    """

    def __init__(self, *, in_all: int = IN_ALL, per_address: int = PER_ADDRESS) -> None:
        self._in_all, self._per_address = in_all, per_address
        self._held: dict[int, tuple[str, Callable[[], None]]] = {}  # the oldest first
        self._counts: Counter[str] = Counter()
        self._numbers = itertools.count()
        self._mutex = threading.Lock()

    @property
    def count(self) -> int:
        """Connections that count now."""
        return len(self._held)

    def admit(self, address: str, drop: Callable[[], None]) -> Callable[[], None]:
        """Counts a connection, and closes the oldest one where that is one too many.

        Args:
            address: where it comes from.
            drop: closes it without waiting, from any thread. Called at most once.

        Returns:
            To be called when the connection is proved or has ended; calling it again has no effect.
        """
        with self._mutex:
            oldest = None
            if self._counts[address] >= self._per_address:
                oldest = next(number for number, (of, _) in self._held.items() if of == address)
            elif len(self._held) >= self._in_all:
                oldest = next(iter(self._held))
            dropped = self._remove(oldest) if oldest is not None else None
            number = next(self._numbers)
            self._held[number] = (address, drop)
            self._counts[address] += 1
        if dropped is not None:
            dropped()

        def settle() -> None:
            with self._mutex:
                self._remove(number)

        return settle

    @contextlib.contextmanager
    def admitted(self, sock: socket.socket) -> Iterator[None]:
        """Counts a connected socket within the block. When it is dropped, reads from it find its end."""
        settle = self.admit(origin(sock), lambda: shut(sock))
        try:
            yield
        finally:
            settle()

    def _remove(self, number: int) -> Callable[[], None] | None:
        address, drop = self._held.pop(number, ("", None))
        if drop is not None:
            self._counts[address] -= 1
            if not self._counts[address]:
                del self._counts[address]
        return drop


def origin(sock: socket.socket) -> str:
    """Where a connection comes from: an IPv4 address, a /64 network of IPv6 (one customer's), or "" (a Unix socket)."""
    try:
        if sock.family not in (socket.AF_INET, socket.AF_INET6):
            return ""
        address = ipaddress.ip_address(str(sock.getpeername()[0]).partition("%")[0])
    except (OSError, ValueError):  # it has ended already
        return ""
    if isinstance(address, ipaddress.IPv4Address):
        return str(address)
    return str(address.ipv4_mapped or ipaddress.ip_network((address, 64), strict=False))


def shut(sock: socket.socket) -> None:
    """Ends both directions of a socket that another task or thread reads from, which then finds its end."""
    with contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
