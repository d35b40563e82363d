"""Listening sockets, beyond this machine only if permitted, and sockets in forked children.

A forked child inherits every socket. While it lives, its copies would keep a dead parent's port taken and its
connections open, so the other ends would wait for ever. Therefore a child closes its copies first of all.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import stat
import weakref
from collections.abc import Callable

from ephemeron.errors import JobError

_SOCKETS: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def listen_tcp(host: str, port: int, *, allow_remote: bool) -> socket.socket:
    """A listening TCP socket.

    Raises:
        JobError: other machines could reach it, and `allow_remote` is not set.
    """
    if not allow_remote and not is_loopback(host):
        raise JobError(
            f"{host!r} can be reached from other machines", remedy="listen on 127.0.0.1, or say allow_remote=True if that is meant"
        )
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return not_in_children(socket.create_server((host, port), family=family, backlog=1024))


def listen_unix(path: str) -> tuple[socket.socket, Callable[[], None]]:
    """A listening Unix socket that only this user can open; a stale socket file is replaced.

    Returns:
        The socket, and what removes its file, unless another has taken its place.
    """
    if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
        os.unlink(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(path)
        os.chmod(path, 0o600)
        sock.listen(1024)
        file = os.stat(path)
    except BaseException:
        sock.close()
        raise

    def remove() -> None:
        if os.path.exists(path) and os.path.samestat(os.stat(path), file):
            os.unlink(path)

    return not_in_children(sock), remove


def is_loopback(host: str) -> bool:
    """Whether an address is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def not_in_children(sock: socket.socket) -> socket.socket:
    """The same socket, which forked children will close."""
    _SOCKETS.add(sock)
    return sock


def _close_copies() -> None:
    for sock in list(_SOCKETS):
        sock.close()


os.register_at_fork(after_in_child=_close_copies)
