"""Virtual time: an asyncio loop whose clock jumps to the next deadline instead of waiting for it.

Ordinary coroutines run unchanged; `loop.time()` is the virtual now. Ties are broken by the order of
scheduling, so two runs are the same to the last bit. Real sockets and subprocesses do not fit in here. While threads work for the
loop, and inside `in_real_time` (requests to folders and object stores), the clock stands still.

A run of hundreds of workers is millions of timers and callbacks, so the loop's inner part is written anew: timers
are tuples in a heap, which compare in C and keep their order among equals, and no selector is asked. Against
asyncio's own inner part this makes a simulation about 1.5 times as fast; it rests on the same private names
(`_ready`, `_run_once`, `_timer_handle_cancelled`) that asyncio's event loops share since Python 3.5.

One loop of virtual time on a thread of its own, for simulations that are started one after the other from outside.

While something is simulated the clock jumps from deadline to deadline; between simulations it stands still.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import heapq
import threading
from collections import deque
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar

from ephemeron.blocking import VirtualClock, in_real_time
from ephemeron.errors import SimulationDeadlock

T = TypeVar("T")

GARBAGE_EVERY = 50_000
"""New objects between two searches for cycles. Tasks leave hardly any, and the usual 700 cost a third of the time."""


class VirtualTimeLoop(VirtualClock, asyncio.SelectorEventLoop):
    """An event loop in virtual time, starting at 0."""

    _ready: deque[asyncio.Handle]

    def __init__(self) -> None:
        super().__init__()
        self._now = 0.0
        self._timers: list[tuple[float, int, asyncio.TimerHandle]] = []
        self._count = 0
        self._cancelled = 0
        self._woken = threading.Event()

    def time(self) -> float:
        return self._now

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self._now + delay, callback, *args, context=context)

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        handle._scheduled = True  # type: ignore[attr-defined]  # or the loop would not learn of its cancellation
        self._count += 1
        heapq.heappush(self._timers, (when, self._count, handle))
        return handle

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> asyncio.Future[Any]:  # type: ignore[override]
        future = super().run_in_executor(executor, func, *args)
        self.real_waits += 1

        def ended(_: asyncio.Future[Any]) -> None:
            self.real_waits -= 1

        future.add_done_callback(ended)
        return future

    async def shutdown_default_executor(self, *args: Any) -> None:
        with in_real_time():
            await super().shutdown_default_executor(*args)

    def _write_to_self(self) -> None:  # called after each `call_soon_threadsafe`
        self._woken.set()

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Timers of waits that ended well stay in the heap until they are most of it."""
        self._cancelled += 1
        if self._cancelled > 1000 and 2 * self._cancelled > len(self._timers):
            self._timers = [timer for timer in self._timers if not timer[2].cancelled()]
            heapq.heapify(self._timers)
            self._cancelled = 0

    def _run_once(self) -> None:
        """Runs ready callbacks; if none is ready, moves the clock to the next timer that is not cancelled."""
        ready = self._ready
        if not ready:
            self._advance()
        timers = self._timers
        while timers and timers[0][0] <= self._now:
            self._due(heapq.heappop(timers)[2])
        for _ in range(len(ready)):
            handle = ready.popleft()
            if not handle.cancelled():
                handle._run()

    def _advance(self) -> None:
        if self.real_waits:
            self._woken.wait()
            self._woken.clear()
            return
        timers = self._timers
        while timers and timers[0][2].cancelled():
            self._due(heapq.heappop(timers)[2])
        if not timers:
            raise SimulationDeadlock("all tasks wait and nothing is scheduled")
        self._now = max(self._now, timers[0][0])

    def _due(self, handle: asyncio.TimerHandle) -> None:
        handle._scheduled = False  # type: ignore[attr-defined]
        if handle.cancelled():
            self._cancelled -= 1
        else:
            self._ready.append(handle)


def run(main: Coroutine[Any, Any, T]) -> T:
    """`asyncio.run` in virtual time."""
    results: list[T] = []

    async def kept() -> None:  # a runner that handles Ctrl-C has its task described twice, with all that it returns
        results.append(await main)

    with _rare_garbage_collection(), asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        runner.run(kept())
    return results[0]


@contextmanager
def _rare_garbage_collection() -> Iterator[None]:
    before = gc.get_threshold()
    gc.set_threshold(GARBAGE_EVERY, *before[1:])
    try:
        yield
    finally:
        gc.set_threshold(*before)


# -- one loop of virtual time on a thread of its own --------------------------------------------------------------


class _StandingLoop(VirtualTimeLoop):
    """Waits for work from other threads where nothing is simulated."""

    def __init__(self) -> None:
        super().__init__()
        self.simulated = 0
        """Coroutines that have begun and not ended."""

    def _advance(self) -> None:
        try:
            super()._advance()
        except SimulationDeadlock:
            if self.simulated:
                raise
            self._woken.wait()
            self._woken.clear()


class VirtualTimeThread:
    """The thread. `close` ends it."""

    def __init__(self) -> None:
        self._loop = _StandingLoop()
        self._futures: set[Future[Any]] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._thread = threading.Thread(target=self._run, name="ephemeron-simulation", daemon=True)
        self._thread.start()

    def submit(self, work: Callable[[], Coroutine[Any, Any, T]]) -> Future[T]:
        """Runs a coroutine in virtual time, beside those that run already, in a copy of the caller's context.

        Raises:
            SimulationDeadlock: an earlier simulation has ended the loop.
        """
        if not self._thread.is_alive():
            raise SimulationDeadlock("an earlier simulation has ended the loop of virtual time")
        ended: Future[T] = Future()
        self._futures.add(ended)
        context = contextvars.copy_context()

        async def body() -> None:
            self._loop.simulated += 1
            try:
                value = await work()
            except BaseException as e:
                self._futures.discard(ended)
                ended.set_exception(e)
                if not isinstance(e, Exception):
                    raise
            else:
                self._futures.discard(ended)
                ended.set_result(value)
            finally:
                self._loop.simulated -= 1

        def begin() -> None:
            task = self._loop.create_task(body(), context=context)
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

        self.call(begin)
        return ended

    def call(self, callback: Callable[[], None]) -> None:
        """Calls something on the thread."""
        self._loop.call_soon_threadsafe(callback)

    def close(self) -> None:
        """Ends the thread. What is simulated has ended before."""
        if self._thread.is_alive():
            self.call(self._loop.stop)
            self._thread.join()
        self._loop.close()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_forever()
        except BaseException as e:  # noqa: BLE001 - a deadlock ends all simulations of the loop
            for ended in list(self._futures):
                self._futures.discard(ended)
                ended.set_exception(e)
