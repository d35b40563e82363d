"""Processes that tests kill: `mortal.py server FACE SOCKET`, `client FACE SOCKET`, `forking FACE SOCKET`."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from pathlib import Path

from faces import TOKEN, Handlers, Loop, Served, in_thread

from ephemeron.communication.rpc import Client
from ephemeron.errors import ConnectionLost


def server(face: str, path: Path) -> None:
    Served(face, Loop(), Handlers(), path, None)
    say("ready")
    sys.stdin.read()


def client(face: str, path: Path) -> None:
    connected = dial(face, path)
    views = connected.call("echo", {}, [bytes(500_000)])[1]
    calling = in_thread(lambda: connected.call("wait", {}, [bytes(500_000)]))
    say(f"ready {len(views)}")
    calling()


def forking(face: str, path: Path) -> None:
    """Forks while connected; the child says what it finds and then lives on, as its parent does."""
    if face == "asyncio":
        asyncio.run(forking_later(path))
        return
    connected = dial(face, path)
    (view,) = connected.call("echo", {}, [b"x" * 500_000])[1]
    if os.fork() == 0:
        try:
            connected.call("echo")
        except ConnectionLost as e:
            say(f"child: {e} {'may repeat' if e.may_repeat else ''} {bytes(view[:3])}")
        again = dial("blocking", path)
        say(f"child again: {again.call('echo', {'a': 1})[0]}")
        again.close()
        live_on()
    for _ in range(3):
        connected.call("echo", {}, [bytes(500_000)])
    say(f"parent: {bytes(view[:3])}")
    sys.stdin.read()


async def forking_later(path: Path) -> None:
    connected = await Client.connect_shared(path, token=TOKEN)
    (view,) = (await connected.call("echo", {}, [b"x" * 500_000]))[1]
    if os.fork() == 0:
        live_on()
    for _ in range(3):
        await connected.call("echo", {}, [bytes(500_000)])
    say(f"parent: {bytes(view[:3])}")
    await asyncio.sleep(600)


def live_on() -> None:
    say(f"child pid {os.getpid()}")
    time.sleep(600)


def say(words: str) -> None:
    os.write(1, f"{words}\n".encode())  # at once, or two processes' words would mix


def dial(face: str, path: Path) -> object:
    served = Served.__new__(Served)
    served.path, served._loop = path, Loop() if face == "asyncio" else None
    return served.connect(face, "shared", token=TOKEN)


if __name__ == "__main__":
    {"server": server, "client": client, "forking": forking}[sys.argv[1]](sys.argv[2], Path(sys.argv[3]))
