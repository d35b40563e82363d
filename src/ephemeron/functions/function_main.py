"""The process in which local functions run, one invocation after the other.

The host starts it as `python -m ephemeron.functions.function_main FD PARENT`, or forks it from a process started with
`forks` as third argument (`forking`). Host and process talk over an inherited socket (`process_messages`), because standard
output belongs to the user's code. The cold start is the time between `Start`, which the host sends once the process is under
its memory quota, and `Ready`: imports, or taking over the memory of the process it was forked from. Two threads serve the
socket, so that an event costs the function one queue entry, however slow the host is.

Each call names its code (`entries`). The environment variable `EPHEMERON_PRELOAD` names the modules imported in advance.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn, TypeAlias

from ephemeron import logs
from ephemeron.errors import CorruptMessage, InvocationRefused
from ephemeron.events import Event, to_json
from ephemeron.functions import entries
from ephemeron.functions.base import Call
from ephemeron.functions.context import Context, ThreadCompute
from ephemeron.functions.forking import serve_forks, take_over
from ephemeron.functions.function_output import printed_to, warnings_emitted
from ephemeron.functions.process_messages import (
    EventMessage,
    FunctionMessage,
    InvokeMessage,
    InvokeSuccessor,
    Raised,
    Ready,
    Returned,
    Running,
    Start,
    StartFailed,
    SuccessorAccepted,
    SuccessorRefused,
    encode,
    host_message,
)
from ephemeron.functions.process_reset import ProcessSnapshot, renew_randomness
from ephemeron.user_code import failure, never_interrupted

_Accepted: TypeAlias = "asyncio.Future[None]"

_log = logging.getLogger("ephemeron.functions.function_main")  # this module runs as `__main__`

_FLUSH_S = 1.0
_PR_SET_PDEATHSIG = 1


class HostLine:
    """The connection to the host. Any thread may send; `calls` holds `Start` and invocations.

    Args:
        sock: connected, blocking.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.calls: queue.SimpleQueue[Start | InvokeMessage] = queue.SimpleQueue()
        self._sock = sock
        self._outgoing: queue.SimpleQueue[FunctionMessage | threading.Event] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._asked: dict[int, _Accepted] = {}
        for work in (self._read, self._write):
            threading.Thread(target=work, name=f"host{work.__name__}", daemon=True).start()

    def send(self, message: FunctionMessage) -> None:
        """Queues a message that is JSON; messages arrive in order."""
        self._outgoing.put(message)

    def flush(self) -> None:
        """Waits, for a second at most, until all queued messages are sent."""
        left = threading.Event()
        self._outgoing.put(left)
        left.wait(_FLUSH_S)

    async def invoke(self, call: Call) -> None:
        """Asks the host to start another function.

        Raises:
            InvocationRefused: the host refuses; its reason is the text.
        """
        number = next(self._numbers)
        accepted: _Accepted = asyncio.get_running_loop().create_future()
        self._asked[number] = accepted
        try:
            self.send(InvokeSuccessor(number=number, call=call))
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
                self._sock.sendall(encode(message))
            except OSError:
                _end_with_host()

    def _read(self) -> None:
        try:
            for line in self._sock.makefile("rb"):
                message = host_message(line)
                if isinstance(message, (SuccessorAccepted, SuccessorRefused)):
                    self._answered(message)
                else:
                    self.calls.put(message)
        except (OSError, CorruptMessage):
            pass  # the same as the end of the connection
        _end_with_host()

    def _answered(self, message: SuccessorAccepted | SuccessorRefused) -> None:
        accepted = self._asked.get(message.number)
        if accepted is None:
            return  # the invocation has cancelled the request

        def settle() -> None:
            if accepted.done():
                return
            if isinstance(message, SuccessorRefused):
                accepted.set_exception(InvocationRefused(message.text))
            else:
                accepted.set_result(None)

        try:
            accepted.get_loop().call_soon_threadsafe(settle)
        except RuntimeError:
            pass  # the invocation that asked has ended, and its loop with it


def main() -> None:
    """Serves the host until it closes the connection."""
    logs.configure()
    never_interrupted()
    host = int(sys.argv[2])
    _die_with_parent(host)
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    line = _forked(sock, host) if sys.argv[3:] == ["forks"] else _fresh(sock)
    line.send(Ready(pid=os.getpid()))
    while True:
        message = line.calls.get()
        if isinstance(message, InvokeMessage):
            with logs.context(**message.call.log_fields):
                _serve(line, message)
            gc.collect()


def _fresh(sock: socket.socket) -> HostLine:
    line = HostLine(sock)
    line.calls.get()
    try:
        _prepare()
    except BaseException as e:  # noqa: BLE001 - any exception of an import is the function's failure
        error, trace = failure(e)
        line.send(StartFailed(error=error, traceback=trace))
        line.flush()
        sys.exit(1)
    return line


def _forked(control: socket.socket, host: int) -> HostLine:
    """Serves forks; returns in the processes that are functions."""
    sock, pages = serve_forks(control, _prepare)
    del sys.argv[3:]
    line = HostLine(sock)
    line.calls.get()
    _die_with_parent(host)
    take_over(pages)
    return line


def _prepare() -> None:
    entries.preload()
    gc.collect()
    gc.freeze()  # imports stay: traversing PyTorch after every invocation would take 0.3 s


def _serve(line: HostLine, message: InvokeMessage) -> None:
    scratch = Path(message.scratch).resolve()
    before = ProcessSnapshot(scratch)
    os.environ.update(message.variables)
    if message.cold:
        renew_randomness()
    line.send(Running())
    value: Mapping[str, object] = {}
    raised: tuple[str, str] | None = None
    with printed_to(None if message.log is None else Path(message.log)):
        _log.debug("invocation %s begins", message.invocation)
        try:
            value = asyncio.run(_handle(line, message, scratch))
        except BaseException as e:  # noqa: BLE001 - whatever ends the loop is the user's: the host ends processes, not exceptions
            raised = failure(e)
            sys.stderr.write(raised[1])
        _log.debug("invocation %s ends", message.invocation)
        sys.stdout.flush()
        sys.stderr.flush()
    reusable = before.restore()
    if raised is None:
        line.send(Returned(value=value, reusable=reusable))
    else:
        line.send(Raised(error=raised[0], traceback=raised[1], reusable=reusable))


async def _handle(line: HostLine, message: InvokeMessage, scratch: Path) -> Mapping[str, object]:
    from ephemeron.communication.channels.address import open_channel

    loop = asyncio.get_running_loop()
    deadline = loop.time() + message.lifetime_s
    call = message.call

    def emit(event: Event) -> None:
        line.send(EventMessage(line=to_json(event)))

    def die() -> NoReturn:
        line.flush()  # events before an injected death must reach the host
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError("unreachable")

    compute = ThreadCompute(max(1, int(message.vcpus)))
    try:
        with warnings_emitted(emit, lambda: time.time() - message.origin):
            async with open_channel(call.channel, base=Path(message.base)) as channel:
                return await entries.serve(
                    Context(
                        call=call,
                        invocation=message.invocation,
                        channel=channel,
                        emit=emit,
                        flush=line.flush,
                        invoke=line.invoke,
                        compute=compute,
                        origin=loop.time() - (time.time() - message.origin),
                        deadline=deadline,
                        die=die,
                        cpu_time=time.process_time,
                        scratch=scratch,
                        cold=message.cold,
                    )
                )
    finally:
        compute.close()


def _die_with_parent(parent: int) -> None:
    """Has the kernel kill this process when the host dies; on systems other than Linux it ends with the connection."""
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        _end_with_host()


def _end_with_host() -> NoReturn:
    """Ends this process, and those it has started if it leads its group: no invocation outlives the host."""
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    main()
