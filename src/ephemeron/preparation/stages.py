"""What stages of a preparation share: where their functions run, and what an unfinished one knows.

Its state is JSON objects beside its output, each with a checksum in a last line. Each is created once.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import xxhash

from ephemeron.config.paths import AnyPath
from ephemeron.data.catalog.files import FileRange
from ephemeron.data.catalog.loop import run
from ephemeron.data.catalog.open_files import open_files
from ephemeron.errors import DatasetDamaged

STATE = "state"


class State:
    """Objects below `URL/state`.

    Args:
        url: folder or prefix of a dataset.
    """

    def __init__(self, url: AnyPath) -> None:
        self._files = open_files(url)

    def create(self, name: str, value: Any) -> Any:
        """Stores a value, or returns the one that is stored under this name already.

        Raises:
            DatasetDamaged: that one is not as it was stored.
        """
        text = json.dumps(value, separators=(",", ":")).encode()
        if run(self._files.create(f"{STATE}/{name}.json", b"%b\n%b" % (text, xxhash.xxh3_64_hexdigest(text).encode()))):
            return value
        return self.read(name)

    def read(self, name: str) -> Any:
        """A value; None: there is none.

        Raises:
            DatasetDamaged: it is not as it was stored.
        """
        try:
            (data,) = run(self._files.fetch([FileRange(f"{STATE}/{name}.json")]))
        except FileNotFoundError:
            return None
        return _opened(data, name)

    def names(self, prefix: str) -> list[str]:
        """Names that begin with `prefix`, which ends in a slash."""
        found = run(self._files.tree(f"{STATE}/{prefix.rstrip('/')}"))
        return [path.removeprefix(f"{STATE}/").removesuffix(".json") for path in found if path.endswith(".json")]

    def read_all(self, prefix: str) -> dict[str, Any]:
        """Values by the rest of their names."""
        names = self.names(prefix)
        found = run(self._files.fetch([FileRange(f"{STATE}/{name}.json") for name in names])) if names else []
        return {name.removeprefix(prefix): _opened(data, name) for name, data in zip(names, found, strict=True)}


def _opened(data: bytes, name: str) -> Any:
    text, _, checksum = bytes(data).rpartition(b"\n")
    if xxhash.xxh3_64_hexdigest(text).encode() != checksum:
        raise DatasetDamaged("damaged, or of another release: delete it, and what it says is found out again", file=f"{STATE}/{name}.json")
    return json.loads(text)


# -- where the functions of a preparation run: a `FunctionExecutor`, or this process ------------------------------


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
