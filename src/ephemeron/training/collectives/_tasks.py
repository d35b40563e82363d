"""Concurrent requests."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Generic, TypeVar

T = TypeVar("T")


class RequestWindow(Generic[T]):
    """Results of coroutines in order, a few of them running ahead."""

    def __init__(self, coroutines: list[Coroutine[None, None, T]], window: int) -> None:
        self._waiting = coroutines[::-1]
        self._running: list[asyncio.Future[T]] = []
        self._window = window

    async def next(self) -> T:
        while self._waiting and len(self._running) < self._window:
            self._running.append(asyncio.ensure_future(self._waiting.pop()))
        return await self._running.pop(0)

    def cancel(self) -> None:
        for task in self._running:
            task.cancel()
        for coroutine in self._waiting:
            coroutine.close()


async def all_of(coroutines: Iterable[Awaitable[T]]) -> list[T]:
    """Like `gather`, but a lone coroutine costs no task, and a failure cancels the others."""
    todo = list(coroutines)
    if len(todo) == 1:
        return [await todo[0]]
    if not todo:
        return []
    tasks = [asyncio.ensure_future(c) for c in todo]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        raise
