"""The process that reads object stores for forked processes. See `store_process`, which starts it."""

from __future__ import annotations

import asyncio
import pickle
import signal
import socket
from collections.abc import Callable, Mapping
from typing import Any

from ephemeron.data.catalog.files import Files
from ephemeron.data.catalog.open_files import open_files
from ephemeron.data.catalog.store_process import MAX_IN_FLIGHT, receive_message, send_message
from ephemeron.errors import EphemeronError, FileVersionChanged


def main(control: int) -> None:
    """Serves until all ends of the control socket are closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the trainer
    asyncio.run(_serve(socket.socket(fileno=control)))


async def _serve(control: socket.socket) -> None:
    control.setblocking(False)
    over, loop, tasks = asyncio.Event(), asyncio.get_running_loop(), set[asyncio.Task[None]]()

    def accept() -> None:
        data, fds, _, _ = socket.recv_fds(control, 1, 1)
        if not data:
            loop.remove_reader(control)
            over.set()
        for fd in fds:
            task = loop.create_task(_answer(socket.socket(fileno=fd)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    loop.add_reader(control, accept)
    await over.wait()


async def _answer(sock: socket.socket) -> None:
    """Serves one connection."""
    sock.setblocking(False)
    reader, writer = await asyncio.open_connection(sock=sock, limit=MAX_IN_FLIGHT)
    opened: dict[str, Files] = {}
    tasks = set[asyncio.Task[None]]()
    try:
        while True:
            number, url, method, arguments = await receive_message(reader)
            task = asyncio.get_running_loop().create_task(_one(writer, opened, number, url, method, arguments))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    except (OSError, asyncio.IncompleteReadError):
        pass
    finally:
        writer.close()


async def _one(
    writer: asyncio.StreamWriter, opened: dict[str, Files], number: int, url: str, method: str, arguments: tuple[Any, ...]
) -> None:
    kind, value = "value", None
    try:
        if url not in opened:
            opened[url] = open_files(url)
        value = await _METHODS[method](opened[url], *arguments)
    except FileNotFoundError as e:
        kind, value = "absent", e.args[0]
    except FileVersionChanged as e:
        kind, value = "changed", (e.path, e.wanted, e.found)
    except EphemeronError as e:
        kind, value = "refused", pickle.dumps(e)
    except Exception as e:  # noqa: BLE001 - it is raised in the calling process
        kind, value = "failed", f"{type(e).__name__}: {e}"
    if not writer.is_closing():
        send_message(writer, (number, kind, value))


_METHODS: Mapping[str, Callable[..., Any]] = {
    name: (lambda files, *arguments, name=name: getattr(files, name)(*arguments))
    for name in ("fetch", "size", "identity", "identities", "tree", "folders", "create")
}
