"""Calls of `joblib.Parallel`, where functions run them. Functions find this module by its name alone."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, TypeAlias

import joblib
from joblib.parallel import SequentialBackend, ThreadingBackend

Shape: TypeAlias = tuple[int, tuple[str, ...]]
"""Of a call: how many positional arguments it has, and the names of the others."""


class FunctionThreads(ThreadingBackend):  # type: ignore[misc]
    """Threads of a function, for a `Parallel` in a call: as many as the function has vCPUs, whatever the machine below it has.

    Args:
        vcpus: whole ones, at least 2.
        nesting_level: see joblib.
    """

    def __init__(self, vcpus: int, nesting_level: int) -> None:
        super().__init__(nesting_level=nesting_level)
        self._vcpus = vcpus

    def effective_n_jobs(self, n_jobs: int | None) -> int:
        """As many threads as asked for and as the function has vCPUs."""
        if n_jobs is not None and n_jobs < 0:
            return max(1, self._vcpus + 1 + n_jobs)
        return min(self._vcpus, int(super().effective_n_jobs(n_jobs)))


def nested_backend(vcpus: float, nesting_level: int) -> Any:
    """Back end of a `Parallel` in a call: threads, if the function has several vCPUs, in the first level below the client."""
    if vcpus < 2 or nesting_level > 1:
        return SequentialBackend(nesting_level=nesting_level)
    return FunctionThreads(int(vcpus), nesting_level)


def run_calls(nested: Any, shapes: Sequence[Shape], *values: Any) -> list[Any]:
    """Results of a batch of calls.

    Args:
        nested: back end of a `Parallel` in a call.
        shapes: of the calls.
        values: of each call its function, its positional arguments and the others, one call after the other.
    """
    results, at = [], iter(values)
    with joblib.parallel_config(backend=nested, n_jobs=None):
        for count, names in shapes:
            function, *args = islice(at, 1 + count)
            named = dict(zip(names, at, strict=False))
            results.append(function(*args, **named))
    return results
