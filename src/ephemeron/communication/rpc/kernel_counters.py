"""Bytes of a connection as the kernel has counted them (Linux, `struct tcp_info` of linux/tcp.h): TCP's payload, repeated segments included.

Beside what a program meters itself, this shows what was sent again on a link that loses, and what encryption adds.
"""

from __future__ import annotations

import socket
import struct
from typing import Any
from weakref import WeakKeyDictionary

_TCP_INFO: int | None = getattr(socket, "TCP_INFO", None)
_RECEIVED_AT, _SENT_AT, _LENGTH = 128, 200, 208
_carriers: WeakKeyDictionary[socket.socket, Any] = WeakKeyDictionary()


def carry(plain: socket.socket, carrier: Any) -> None:
    """Says that what passes a plain socket of this process travels over another one, such as encrypted."""
    _carriers[plain] = carrier


def kernel_bytes(sock: socket.socket) -> tuple[int, int] | None:
    """Bytes that the kernel has sent and received over a connection; None: it is closed, is no TCP connection, or they are not counted."""
    carrier = _carriers.get(sock, sock)
    if carrier is None or _TCP_INFO is None or carrier.family not in (socket.AF_INET, socket.AF_INET6):
        return None
    try:
        info = carrier.getsockopt(socket.IPPROTO_TCP, _TCP_INFO, 256)
    except (OSError, ValueError):
        return None
    if len(info) < _LENGTH:  # before Linux 4.19
        return None
    (received,), (sent,) = struct.unpack_from("=Q", info, _RECEIVED_AT), struct.unpack_from("=Q", info, _SENT_AT)
    return sent, received
