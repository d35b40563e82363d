"""The functions that an executor keeps running: as many as have work, another one for each that ends while tasks are left."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterable

from ephemeron.communication.signing import SigningKey
from ephemeron.config.typed import plain
from ephemeron.errors import EphemeronError, InvocationRefused, PlatformError
from ephemeron.executor.places import Place, PlaceOptions
from ephemeron.functions.base import Call, Outcome
from ephemeron.functions.progress_budget import ProgressBudget
from ephemeron.functions.tasks.executor_entry import ExecutorRequest
from ephemeron.functions.tasks.open_queue import Adapter
from ephemeron.functions.tasks.scaling import number_of

_log = logging.getLogger(__name__)

MOST_LOSSES = 8
"""Functions that may end in a row, badly or without a task that they have done, while no task is done."""
_SILENT = 2.0
"""Lease times after which a function that runs and says nothing is replaced."""
_AGAIN_S = 1.0
"""Pause after a refusal for lack of concurrency."""


class Fleet:
    """Executors of one queue.

    Args:
        place: where they run.
        run: name of the run, and of the queue.
        options: of the functions.
        adapter: of the queue.
        key: of the run.
        origin: of its events.
        changed: called when a function has ended.
    """

    def __init__(
        self,
        place: Place,
        *,
        run: str,
        options: PlaceOptions,
        adapter: Adapter,
        key: SigningKey,
        origin: float,
        changed: Callable[[], None],
    ) -> None:
        self._place, self._run, self._options, self._key, self._origin = place, run, options, key, origin
        self._changed = changed
        self._request = ExecutorRequest(
            queue=run,
            resolver="shipped",
            adapter=adapter,
            lease_s=place.lease_s,
            poll_s=place.poll_s,
            cache_mb=options.memory_mb / 4,
            idle_s=options.idle_s,
        )
        self._running: dict[int, asyncio.Task[None]] = {}
        self._heard: dict[int, float] = {}
        """By running function: loop time of its start, or at which the queue has heard of it."""
        self._started = 0
        self._budget = ProgressBudget(MOST_LOSSES)
        self._error: EphemeronError | None = None
        self._not_before = 0.0

    def heard(self, executors: Iterable[str]) -> None:
        """Functions that the queue has heard of lately. Others count as running until they have been silent for long: then they are
        frozen, or hold what they were computing, and another one is started for them.

        Args:
            executors: see `QueueDepth`.
        """
        now = asyncio.get_running_loop().time()
        for number in map(number_of, executors):
            if number in self._running:
                self._heard[number] = now

    def need(self, tasks: int) -> None:
        """Starts functions: the autoscaling factor times the tasks that are left (NumPyWren, section 4), up to the limit."""
        now = asyncio.get_running_loop().time()
        if now < self._not_before:
            return
        silent = sum(now - since > _SILENT * self._place.lease_s for since in self._heard.values())
        silent = min(silent, self._options.max_workers)
        wanted = min(math.ceil(self._options.autoscaling_factor * tasks), self._options.max_workers)
        for _ in range(wanted - len(self._running) + silent):
            number, self._started = self._started, self._started + 1
            self._heard[number] = now
            task = asyncio.ensure_future(self._one(number))
            self._running[number] = task
            task.add_done_callback(lambda _, number=number: self._gone(number))  # type: ignore[misc]

    def check(self, *, progress: int) -> None:
        """Raises the error for which no function can do anything.

        Args:
            progress: number of tasks that have ended.
        """
        self._budget.progressed(progress)
        if self._error is not None:
            raise self._error

    async def ended(self, limit_s: float) -> None:
        """Waits until all functions have ended, for so long at most."""
        if self._running:
            await asyncio.wait(self._running.values(), timeout=limit_s)

    async def cancel(self) -> None:
        """Ends all functions."""
        left = list(self._running.values())
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        with contextlib.suppress(PlatformError):
            await self._place.platform.cancel_all(self._run)

    def _gone(self, number: int) -> None:
        self._running.pop(number, None)
        self._heard.pop(number, None)
        self._changed()

    async def _one(self, number: int) -> None:
        o = self._options
        call = Call(
            run=self._run,
            rank=number,
            attempt=0,
            memory_mb=o.memory_mb,
            lifetime_s=o.lifetime_s,
            channel=self._place.address,
            entry="task-executor",
            origin=self._origin,
            key=self._key.text,
            request=plain(self._request),
        )
        try:
            outcome = await (await self._place.platform.invoke(call)).wait()
        except InvocationRefused as e:
            if e.binding != "concurrency" and "concurrency" not in str(e):
                self._error = self._error or e
            self._not_before = asyncio.get_running_loop().time() + _AGAIN_S
            return
        except EphemeronError as e:
            self._error = self._error or e
            return
        self._judge(outcome)

    def _judge(self, outcome: Outcome) -> None:
        if outcome.status == "cancelled":
            return
        if outcome.status == "ok":
            if outcome.value.get("recorded") or len(self._running) > 1:  # others may be busy with all that there is
                return
            said = f"it found no task that it could do ({outcome.value.get('outcome', 'ok')})"
        else:
            lines = outcome.error.strip().splitlines()
            said = f"{outcome.status}: {lines[0] if lines else outcome.status}"
        _log.info("a function has ended: %s", said)
        is_over = self._budget.ended(said)
        if outcome.status == "error" or is_over:
            times = f", as {self._budget.spent} did in a row" if is_over else ""
            self._error = self._error or PlatformError(f"a function that runs tasks ended{times}: {said}")
