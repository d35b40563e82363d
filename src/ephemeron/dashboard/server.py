"""The socket of the dashboard, and its process until it is ended."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Iterable
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from ephemeron.communication.rpc import is_loopback
from ephemeron.communication.rpc.auth import Token, token_text
from ephemeron.communication.unproved import UnprovedConnections
from ephemeron.errors import JobError, MissingExtra

if TYPE_CHECKING:
    import uvicorn

MIN_TOKEN = 16
"""Characters of a token."""


def serve(
    roots: list[Path], *, host: str, port: int, token: Token, allow_remote: bool, on_ready: Callable[[str], None], names: Iterable[str] = ()
) -> None:
    """Serves until SIGINT or SIGTERM.

    Args:
        roots: folders with runs and studies.
        host, port: where to listen; port 0: any free one.
        token: secret that every request needs.
        allow_remote: whether other machines may reach `host`.
        on_ready: called with the address for a browser, token included.
        names: further names under which it may be addressed.

    Raises:
        JobError: the address is refused or taken, or the token is too short.
        MissingExtra: starlette, uvicorn or msgspec is not installed.
    """
    if not allow_remote and not is_loopback(host):
        raise JobError(f"{host} can be reached from other machines", remedy="add --allow-remote if that is meant")
    token = token_text(token) if token else ""
    if len(token) < MIN_TOKEN or not (token.isascii() and token.isprintable()):
        raise JobError(f"the token has {len(token)} characters", remedy=f"give {MIN_TOKEN} or more printable ones, or none for a new one")
    try:
        import msgspec  # noqa: F401
        import starlette  # noqa: F401
        import uvicorn
    except ModuleNotFoundError as e:
        raise MissingExtra(f"{e.name}, which the dashboard needs,", "dashboard") from None
    from ephemeron.dashboard.access import Access
    from ephemeron.dashboard.app import make_app
    from ephemeron.dashboard.library import Library
    from ephemeron.dashboard.request_limits import limited_protocol

    listening = listen(host, port)
    port = listening.getsockname()[1]
    routes = make_app(Library(roots))
    app = Access(routes, token=token, host=host, port=port, names=names)
    settings = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        lifespan="off",
        http=limited_protocol(UnprovedConnections()),
        ws="none",
    )
    shown = f"[{host}]" if ":" in host else host
    with listening:
        on_ready(f"http://{shown}:{port}/?token={token}")
        asyncio.run(_serve(settings, listening, routes.state.pages.over))


async def _serve(settings: uvicorn.Config, listening: socket.socket, over: asyncio.Event) -> None:
    """Serves until a signal; `over` then ends the streams, which would go on for ever."""
    import uvicorn

    loop = asyncio.get_running_loop()

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            loop.call_soon_threadsafe(over.set)
            self.should_exit = True

    await Server(settings).serve(sockets=[listening])


def listen(host: str, port: int) -> socket.socket:
    """A listening socket.

    Raises:
        JobError: the address is taken or is none of this machine.
    """
    name = host.strip("[]")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM)[0]
        found = socket.socket(family, kind, protocol)
    except OSError as e:
        raise JobError(f"cannot listen at {host}: {e.strerror or e}", remedy="give another --host") from None
    try:
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.listen(128)
    except OSError as e:
        found.close()
        raise JobError(f"cannot listen at {host}:{port}: {e.strerror or e}", remedy="give another --port, or 0 for a free one") from None
    return found
