"""The process in which local functions run, one invocation after the other.

Started as `python -m ephemeron.functions.function_main FD PARENT` by the host, or forked from a process that was started so
with `forks` as third argument (`forking`). The connection is an inherited socket, one line of JSON per message, because
standard output belongs to the user's code. After the host has put this process under its memory quota and before it says
hello, imports happen, or what was forked becomes its own: that is the cold start. Two threads serve the connection, so that
an event costs the function a queue entry and nothing else, however slow the host is.

    host      {"go"}  {"call", "invocation", "origin", "lifetime_s", "vcpus", "scratch", "base", "cold", "log"}
              {"accepted": n}  {"refused": n, "text"}
    function  {"hello"}  {"failed", "traceback"}  {"running"}  {"event"}  {"invoke": n, "call"}
              {"ok", "reusable"}  {"error", "traceback", "reusable"}

Environment variables: `EPHEMERON_ENTRY` names the code to run (`module:function`, an async function from `Context`
to a JSON-able dict), `EPHEMERON_PRELOAD` the modules imported in advance (those not installed are passed over).
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import itertools
import json
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

from ephemeron.errors import InvocationRefused
from ephemeron.events import Event, to_json
from ephemeron.functions.base import Call
from ephemeron.functions.forking import serve_forks, take_over
from ephemeron.functions.function_output import printed_to, warnings_emitted
from ephemeron.functions.process_reset import ProcessSnapshot

DEFAULT_ENTRY = "ephemeron.training.worker.loop:run_worker"
DEFAULT_PRELOAD = "torch,ephemeron.training.worker.loop,ephemeron.training.worker.torch_trainer"

Entry: TypeAlias = Callable[[Any], Awaitable[dict[str, Any]]]
_Accepted: TypeAlias = "asyncio.Future[None]"

_FLUSH_S = 1.0
_TRACEBACK = 8_000
_PR_SET_PDEATHSIG = 1


class HostLine:
    """The connection to the host. Any thread may send; `calls` is what the host asks for.

    Args:
        sock: connected, blocking.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.calls: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._sock = sock
        self._outgoing: queue.SimpleQueue[dict[str, Any] | threading.Event] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Accepted] = {}
        for work in (self._read, self._write):
            threading.Thread(target=work, name=f"host{work.__name__}", daemon=True).start()

    def send(self, message: dict[str, Any]) -> None:
        """Queues a message; messages arrive in order."""
        self._outgoing.put(message)

    def flush(self) -> None:
        """Waits, for a second at most, until all that was sent has left."""
        left = threading.Event()
        self._outgoing.put(left)
        left.wait(_FLUSH_S)

    async def invoke(self, call: Call) -> None:
        """Asks the host to start another function.

        Raises:
            InvocationRefused: by the host, which says why.
        """
        number = next(self._numbers)
        accepted: _Accepted = asyncio.get_running_loop().create_future()
        self._asked[number] = accepted
        try:
            self.send({"invoke": number, "call": call.to_payload()})
            await accepted
        finally:
            self._asked.pop(number, None)

    def _write(self) -> None:
        while True:
            message = self._outgoing.get()
            if isinstance(message, threading.Event):
                message.set()
                continue
            try:
                self._sock.sendall(json.dumps(message, separators=(",", ":")).encode() + b"\n")
            except OSError:
                _end_with_host()

    def _read(self) -> None:
        try:
            for line in self._sock.makefile("rb"):
                message = json.loads(line)
                if "accepted" in message or "refused" in message:
                    self._answered(message)
                else:
                    self.calls.put(message)
        except OSError:
            pass  # the same as its end
        _end_with_host()

    def _answered(self, message: dict[str, Any]) -> None:
        accepted = self._asked.get(message["refused" if "refused" in message else "accepted"])
        if accepted is None:
            return  # whoever asked was cancelled

        def settle() -> None:
            if accepted.done():
                return
            if "refused" in message:
                accepted.set_exception(InvocationRefused(message["text"]))
            else:
                accepted.set_result(None)

        try:
            accepted.get_loop().call_soon_threadsafe(settle)
        except RuntimeError:
            pass  # the invocation that asked has ended, and its loop with it


def main() -> None:
    """Serves the host until it closes the connection."""
    host = int(sys.argv[2])
    _die_with_parent(host)
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    if sys.argv[3:] == ["forks"]:
        line, entry = _forked(sock, host)
    else:
        line, entry = _fresh(sock)
    line.send({"hello": os.getpid()})
    while True:
        _serve(line, entry, line.calls.get())
        gc.collect()


def _fresh(sock: socket.socket) -> tuple[HostLine, Entry]:
    line = HostLine(sock)
    line.calls.get()
    try:
        entry = _prepare()
    except Exception as e:  # noqa: BLE001 - whatever an import raises is the function's failure
        line.send(failure("failed", e))
        line.flush()
        sys.exit(1)
    return line, entry


def _forked(control: socket.socket, host: int) -> tuple[HostLine, Entry]:
    """Serves forks; returns in the processes that are functions."""
    sock, pages, entry = serve_forks(control, _prepare)
    del sys.argv[3:]
    line = HostLine(sock)
    line.calls.get()
    _die_with_parent(host)
    take_over(pages)
    return line, entry


def _prepare() -> Entry:
    entry = prepare_entry()
    gc.collect()
    gc.freeze()  # what was imported stays: looking through it after every invocation would take PyTorch's 0.3 s
    return entry


def prepare_entry() -> Entry:
    """Imports what `EPHEMERON_PRELOAD` names, and the code that `EPHEMERON_ENTRY` names."""
    for name in filter(None, os.environ.get("EPHEMERON_PRELOAD", DEFAULT_PRELOAD).split(",")):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as e:
            if e.name is None or not f"{name}.".startswith(f"{e.name}."):
                raise
    module, _, function = os.environ.get("EPHEMERON_ENTRY", DEFAULT_ENTRY).partition(":")
    entry: Entry = getattr(importlib.import_module(module), function)
    return entry


def _serve(line: HostLine, entry: Entry, message: dict[str, Any]) -> None:
    scratch = Path(message["scratch"]).resolve()
    before = ProcessSnapshot(scratch)
    line.send({"running": True})
    log = message.get("log")
    with printed_to(None if log is None else Path(log)):
        try:
            reply: dict[str, Any] = {"ok": asyncio.run(_handle(line, entry, message, scratch))}
            if not isinstance(reply["ok"], dict):
                raise TypeError(f"a function returns a dict, not {type(reply['ok']).__name__}")
            json.dumps(reply)
        except (Exception, BaseExceptionGroup, SystemExit, asyncio.CancelledError) as e:  # noqa: BLE001 - the user's
            reply = failure("error", e)
            sys.stderr.write(reply["traceback"])
        sys.stdout.flush()
        sys.stderr.flush()
    line.send({**reply, "reusable": before.restore()})


async def _handle(line: HostLine, entry: Entry, message: dict[str, Any], scratch: Path) -> dict[str, Any]:
    from ephemeron.communication.channels.address import open_channel
    from ephemeron.functions.context import Context, ThreadCompute

    loop = asyncio.get_running_loop()
    deadline = loop.time() + message["lifetime_s"]
    call = Call.from_payload(message["call"])

    def emit(event: Event) -> None:
        line.send({"event": to_json(event)})

    def die() -> NoReturn:
        line.flush()  # what was emitted before an injected death happened before it
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    compute = ThreadCompute(max(1, int(message["vcpus"])))
    try:
        with warnings_emitted(emit, lambda: time.time() - message["origin"]):
            async with open_channel(call.channel, base=Path(message["base"])) as channel:
                return await entry(
                    Context(
                        call=call,
                        invocation=message["invocation"],
                        channel=channel,
                        emit=emit,
                        invoke=line.invoke,
                        compute=compute,
                        origin=loop.time() - (time.time() - message["origin"]),
                        deadline=deadline,
                        die=die,
                        cpu_time=time.process_time,
                        scratch=scratch,
                        cold=message["cold"],
                    )
                )
    finally:
        compute.close()


def failure(kind: str, e: BaseException) -> dict[str, Any]:
    """What was raised, as a line and as a traceback."""
    trace = "".join(traceback.format_exception(e))[-_TRACEBACK:]
    while isinstance(e, BaseExceptionGroup) and len(e.exceptions) == 1:
        e = e.exceptions[0]
    text = " ".join(str(e).split())[:1_000]
    return {kind: f"{type(e).__name__}: {text}" if text else type(e).__name__, "traceback": trace}


def _die_with_parent(parent: int) -> None:
    """The kernel kills us when the host dies; elsewhere than on Linux the closed connection has to do."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        _end_with_host()


def _end_with_host() -> NoReturn:
    """No invocation outlives the host: with what it started, if this process leads its group."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
