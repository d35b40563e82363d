"""Coroutines from blocking calls, also where an event loop runs already, as in notebooks.

Where the calling thread has no loop, the coroutine gets one there, and signals reach it as the loop's signal handlers.
Where the thread has one, which cannot be entered twice, the coroutine runs on a thread of its own while the caller
waits, and what interrupts the waiting (`KeyboardInterrupt`) is passed on to it.

Requests that take place outside an event loop say so with `in_real_time`, for loops whose time is virtual.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future, wait
from typing import Any, TypeVar

T = TypeVar("T")


class VirtualClock:
    """Of an event loop: its time stands still while tasks wait for something that takes place in real time."""

    real_waits = 0
    """Tasks that do."""


@contextlib.contextmanager
def in_real_time() -> Iterator[None]:
    """Inside, a task waits for what takes place outside its event loop."""
    loop = asyncio.get_running_loop()
    if not isinstance(loop, VirtualClock):
        yield
        return
    loop.real_waits += 1
    try:
        yield
    finally:
        loop.real_waits -= 1


Runner = Callable[[Coroutine[Any, Any, Any]], Any]
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class HandledInterrupts:
    """Whether a coroutine has handled an interrupt itself, in place of ending by it."""

    happened = False


_handled: contextvars.ContextVar[HandledInterrupts | None] = contextvars.ContextVar("handled interrupts", default=None)


@contextlib.contextmanager
def handled_interrupts() -> Iterator[HandledInterrupts]:
    """Inside, notes interrupts that coroutines handle, so that the caller can raise them when what was stopped has ended well."""
    found = HandledInterrupts()
    before = _handled.set(found)
    try:
        yield found
    finally:
        _handled.reset(before)


class Interrupts:
    """Signal handling of a coroutine: Ctrl-C and SIGTERM cancel it, unless it handles them itself for a while."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._task: asyncio.Task[Any] | None = None
        self._callback: Callable[[], None] | None = None

    @contextlib.contextmanager
    def handled(self, callback: Callable[[], None]) -> Iterator[None]:
        """Calls `callback` on the loop for each interrupt, instead of cancelling the coroutine."""
        loop = asyncio.get_running_loop()
        added = []
        noted = _handled.get()

        def handle() -> None:
            if noted is not None:
                noted.happened = True
            callback()

        self._callback = handle
        try:
            for number in _SIGNALS:
                # Not the main thread, or a loop without signals: then they come by `fire`, or are the caller's affair.
                with contextlib.suppress(RuntimeError, ValueError, NotImplementedError):
                    loop.add_signal_handler(number, handle)
                    added.append(number)
            yield
        finally:
            self._callback = None
            for number in added:
                loop.remove_signal_handler(number)

    def fire(self) -> None:
        """Interrupts the coroutine from another thread."""
        if self._loop is None or self._task is None:
            return
        with contextlib.suppress(RuntimeError):  # it has just ended
            self._loop.call_soon_threadsafe(self._callback or self._task.cancel)

    async def attached(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs the coroutine as the one that is interrupted."""
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        return await work


def run(main: Callable[[Interrupts], Coroutine[Any, Any, T]], runner: Runner = asyncio.run) -> T:
    """Runs a coroutine to its end, whether or not a loop runs in this thread.

    Args:
        main: makes the coroutine; is given the interrupts to handle.
        runner: runs a coroutine in a loop of its own.

    Raises:
        KeyboardInterrupt: it was interrupted and did not handle that.
    """
    interrupts = Interrupts()

    def work() -> T:
        result: T = runner(interrupts.attached(main(interrupts)))
        return result

    return _on_a_thread(work, interrupts) if _is_in_a_loop() else work()  # not inside `except`, which every error below would name


def _is_in_a_loop() -> bool:
    """Whether this thread has a running loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def _on_a_thread(work: Callable[[], T], interrupts: Interrupts) -> T:
    ended: Future[T] = Future()
    context = contextvars.copy_context()  # what is printed there appears where it was asked for

    def body() -> None:
        try:
            ended.set_result(context.run(work))
        except BaseException as e:  # noqa: BLE001 - raised where it was asked for
            ended.set_exception(e)

    thread = threading.Thread(target=body, name="ephemeron", daemon=True)
    interrupted = False
    with _interruptible():
        while not ended.done():
            try:
                if thread.ident is None:
                    thread.start()
                wait([ended])
            except KeyboardInterrupt:
                interrupted = True
                interrupts.fire()
    try:
        return ended.result()
    except asyncio.CancelledError:
        if interrupted:
            raise KeyboardInterrupt from None
        raise


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C raises `KeyboardInterrupt`, also below `asyncio.run`, which would cancel a task that is not waiting."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def terminable() -> Iterator[None]:
    """Turns SIGTERM into `KeyboardInterrupt`, so that cleanup runs. Only where no other handler is installed."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
