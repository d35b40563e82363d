"""Places for the functions of several runs: how many may run at once, and who waits. First come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from ephemeron.errors import PlanInfeasible
from ephemeron.units import human_count


class Places:
    """A number of places, of which a run takes as many as it has workers, for as long as it runs.

    A run that needs many is not overtaken by one that needs few, so it does not wait forever. Belongs to one event loop.

    Args:
        limit: functions at once.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def taken(self, count: int, on_wait: Callable[[str], None]) -> AsyncIterator[float]:
        """Takes places, and gives them back at the end. Yields the seconds that it has waited.

        Args:
            count: of places.
            on_wait: called with a sentence before a wait.

        Raises:
            PlanInfeasible: there will never be as many.
        """
        if count > self.limit:
            raise PlanInfeasible(
                f"the run needs {count} functions at once, and all runs together may have {self.limit}", binding="concurrency"
            )
        loop = asyncio.get_running_loop()
        began = loop.time()
        if self._waiting or self.used + count > self.limit:
            on_wait(
                f"waits for {human_count(count, 'place')}: {self.used} of {self.limit} are taken, {human_count(len(self._waiting), 'run')} are before it"
            )
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.append((count, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():  # its turn came at the same time
                    self._give_back(count)
                else:
                    self._waiting.remove((count, turn))
                    self._call_next()
                raise
        else:
            self.used += count
        try:
            yield loop.time() - began
        finally:
            self._give_back(count)

    def _give_back(self, count: int) -> None:
        self.used -= count
        self._call_next()

    def _call_next(self) -> None:
        while self._waiting and self.used + self._waiting[0][0] <= self.limit:
            count, turn = self._waiting.popleft()
            self.used += count
            turn.set_result(None)
