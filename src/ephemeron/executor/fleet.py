"""The functions that an executor keeps running: as many as have work, another one for each that ends while tasks are left."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Callable, Iterable, Mapping

from ephemeron.communication.signing import SigningKey
from ephemeron.config.typed import plain
from ephemeron.errors import EphemeronError, PlatformError
from ephemeron.executor.places import Place, PlaceOptions
from ephemeron.functions.base import Call, Outcome
from ephemeron.functions.tasks.executor_entry import ExecutorRequest
from ephemeron.functions.tasks.model import number_of
from ephemeron.functions.tasks.open_queue import Adapter
from ephemeron.runs.function_set import MOST_LOSSES, Fail, FunctionSet, How, end_of

_log = logging.getLogger(__name__)

_SILENT = 2.0
"""Lease times after which a function that runs and says nothing is replaced."""


class Fleet:
    """Executors of one queue.

    Args:
        place: where they run.
        run: name of the run, and of the queue.
        options: of the functions.
        adapter: of the queue.
        key, labels: of the run.
        origin: of its events.
        changed: called when a function has ended.
        one_at_a_time: whether functions take no task ahead; see `ExecutorOptions`.
        more_losses: functions that may end in a row without progress, beyond what is borne of all runs.
    """

    def __init__(
        self,
        place: Place,
        *,
        run: str,
        options: PlaceOptions,
        adapter: Adapter,
        key: SigningKey,
        labels: Mapping[str, str],
        origin: float,
        changed: Callable[[], None],
        one_at_a_time: bool = False,
        more_losses: int = 0,
    ) -> None:
        self._place, self._run, self._options, self._key, self._origin = place, run, options, key, origin
        self._changed, self._labels = changed, labels
        self._request = ExecutorRequest(
            queue=run,
            resolver="shipped",
            adapter=adapter,
            lease_s=place.lease_s,
            poll_s=place.poll_s,
            cache_mb=options.memory_mb / 4,
            idle_s=options.idle_s,
            one_at_a_time=one_at_a_time,
        )
        self._running: dict[int, asyncio.Task[None]] = {}
        self._heard: dict[int, float] = {}
        """By running function: loop time of its start, or at which the queue has heard of it."""
        self._set = FunctionSet(is_shared=True, most_losses=MOST_LOSSES + more_losses)
        self._adopted: set[int] = set()
        self._error: EphemeronError | None = None

    def adopt(self, numbers: Iterable[int]) -> None:
        """Functions that run already. They count as running until `left`."""
        for number in numbers:
            self._set.adopt(number)
            self._adopted.add(number)

    def left(self, number: int) -> None:
        """A function that was adopted may have ended."""
        if number in self._adopted:
            self._adopted.remove(number)
            self._set.ended(number, "done")
            self._changed()

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
        silent = sum(now - since > _SILENT * self._place.lease_s for since in self._heard.values())
        silent = min(silent, self._options.max_workers)
        self._set.want(min(math.ceil(self._options.autoscaling_factor * tasks), self._options.max_workers) + silent)
        for action in self._set.decide(now):
            if isinstance(action, Fail):
                times = f", as {action.losses} did in a row" if action.losses > 1 else ""
                self._error = self._error or PlatformError(f"a function that runs tasks ended{times}: {action.cause}")
                continue
            self._heard[action.slot] = now
            task = asyncio.ensure_future(self._one(action.slot))
            self._running[action.slot] = task
            task.add_done_callback(lambda _, number=action.slot: self._gone(number))  # type: ignore[misc]

    def check(self, *, progress: int) -> None:
        """Raises the error for which no function can do anything.

        Args:
            progress: number of tasks that have ended.
        """
        self._set.progressed(progress)
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
            labels=self._labels,
            request=plain(self._request),
        )
        try:
            outcome = await (await self._place.platform.invoke(call)).wait()
        except EphemeronError as e:
            how, said = end_of(e), str(e)
            if how == "failed":
                self._error = self._error or e
        else:
            how, said = self._judge(outcome)
        self._set.ended(number, how, said, now=asyncio.get_running_loop().time())

    def _judge(self, outcome: Outcome) -> tuple[How, str]:
        if outcome.status == "cancelled":
            return "cancelled", ""
        if outcome.status == "ok":
            if outcome.value.get("recorded") or len(self._running) > 1:  # others may be busy with all that there is
                return "done", ""
            said = f"it found no task that it could do ({outcome.value.get('outcome', 'ok')})"
        else:
            lines = outcome.error.strip().splitlines()
            said = f"{outcome.status}: {lines[0] if lines else outcome.status}"
        _log.info("a function has ended: %s", said)
        return ("failed" if outcome.status == "error" else "lost"), said
