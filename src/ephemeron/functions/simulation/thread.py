"""One loop of virtual time on a thread of its own, for simulations that are started one after the other from outside.

While something is simulated the clock jumps from deadline to deadline; between simulations it stands still.
"""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from ephemeron.errors import SimulationDeadlock
from ephemeron.functions.simulation.virtual_time import VirtualTimeLoop

T = TypeVar("T")


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
