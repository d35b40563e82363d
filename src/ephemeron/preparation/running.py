"""Where the functions of a preparation run: a `FunctionExecutor`, or this process."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol


class Runner(Protocol):
    """What preparation needs of an executor."""

    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any]) -> Iterator[Any]:
        """Results in order."""
        ...

    def map_reduce(
        self, fn: Callable[[Any], Any], items: Iterable[Any], combine: Callable[[Any, Any], Any], *, chunksize: int = ..., fan_in: int = ...
    ) -> Any:
        """A future of the combined results."""
        ...


class InProcess:
    """Runs functions in this process, one after the other: for tests and small data."""

    def map(self, fn: Callable[..., Any], *iterables: Iterable[Any]) -> Iterator[Any]:
        """Results in order."""
        return map(fn, *iterables)

    def map_reduce(
        self, fn: Callable[[Any], Any], items: Iterable[Any], combine: Callable[[Any, Any], Any], *, chunksize: int = 8, fan_in: int = 8
    ) -> _Known:
        """A result that is there."""
        return _Known(functools.reduce(combine, map(fn, items)))


class _Known:
    def __init__(self, value: Any) -> None:
        self._value = value

    def result(self) -> Any:
        return self._value


def runner(pool: Runner | None, items: Sequence[Any]) -> AbstractContextManager[Runner]:
    """The pool, or where there is none: this process for one item, else functions of this machine, until the context ends."""
    if pool is not None:
        return nullcontext(pool)
    if len(items) <= 1:
        return nullcontext(InProcess())
    from ephemeron.executor import FunctionExecutor

    return FunctionExecutor("local", name="prepare")
