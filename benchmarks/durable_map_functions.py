"""Functions of `benchmarks.durable_map`. The file is copied into a folder of its own, from which all sides import it, as a user's module would be."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any


def empty(n: int) -> int:
    """Does nothing."""
    return n


def busy(task: Sequence[float]) -> float:
    """Computes for so many seconds of CPU time. The task is its number and the seconds."""
    ends_at = time.thread_time() + task[1]
    while time.thread_time() < ends_at:
        pass
    return task[0]


def sleep(task: Sequence[float]) -> float:
    """Sleeps so many seconds. The task is its number and the seconds."""
    time.sleep(task[1])
    return task[0]


def reverse(data: bytes) -> bytes:
    """As many bytes as it is given."""
    return data[::-1]


def logged(key: str, seconds: float, log: str) -> dict[str, str]:
    """Sleeps, and says in a log when it begins and ends: kind, key, process, monotonic time."""
    _append(log, f"begin {key} {os.getpid()} {time.monotonic()}\n")
    time.sleep(seconds)
    _append(log, f"end {key} {os.getpid()} {time.monotonic()}\n")
    return {"key": key}


def counted(n: str, log: str) -> int:
    """Says in a log that it was called."""
    _append(log, f"{n}\n")
    return int(n)


def counted_slowly(n: str, seconds: float, log: str) -> int:
    """The same, and sleeps."""
    time.sleep(seconds)
    return counted(n, log)


def regression(group: Mapping[str, Any], key: Mapping[str, int]) -> tuple[dict[str, Any], dict[str, float]]:
    """Slopes of a group's rows with confidence intervals by the bootstrap, logged as in `logged`. LOG and BOOTSTRAPS are written at this module's end."""
    import numpy as np

    log, bootstraps = globals()["LOG"], globals()["BOOTSTRAPS"]
    name = f"[{key['group']}]"  # as it is in the table of results
    _append(log, f"begin {name} {os.getpid()} {time.monotonic()}\n")
    names = sorted(column for column in group if column.startswith("x"))
    x, y, rng = np.column_stack([group[column] for column in names]), group["y"], np.random.default_rng(0)
    slopes, *_ = np.linalg.lstsq(x, y, rcond=None)
    drawn = []
    for _ in range(bootstraps):
        rows = rng.integers(0, len(y), len(y))
        part = x[rows]
        drawn.append(np.linalg.solve(part.T @ part, part.T @ y[rows]))
    low, high = np.quantile(drawn, (0.025, 0.975), axis=0)
    _append(log, f"end {name} {os.getpid()} {time.monotonic()}\n")
    return {"slopes": slopes, "low": low, "high": high}, {"rmse": float(np.sqrt(np.mean((x @ slopes - y) ** 2)))}


def fit(group: pandas.DataFrame) -> dict[str, float]:  # noqa: F821 - functions that take no frame do without pandas
    """Slopes of a group's rows."""
    import numpy as np

    names = [column for column in group.columns if column.startswith("x")]
    slopes, *_ = np.linalg.lstsq(group[names].to_numpy(float), group["y"].to_numpy(), rcond=None)
    return dict(zip(names, map(float, slopes), strict=True))


def fitted(group: pandas.DataFrame) -> tuple[dict[str, float], dict[str, float]]:  # noqa: F821
    """The same, as a model and its metrics."""
    slopes = fit(group)
    return slopes, slopes


def nothing(item: dict[str, object]) -> None:
    """Does nothing, with an item that has a key."""


def _append(log: str, line: str) -> None:
    file = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(file, line.encode())  # in one piece, beside those of other processes
    finally:
        os.close(file)
