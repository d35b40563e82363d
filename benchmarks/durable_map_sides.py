"""The sides of part `beside` of `benchmarks.durable_map`, each in a process of its own: started, an empty task, a few of the load, and all of them.

    python -m benchmarks.durable_map_sides --side Ray --load empty --count 2000 --amount 0 --workers 2 --folder FOLDER

The process is a subreaper (prctl(2)), so all that a side starts stays below it, detached daemons too: CPU seconds are of that whole tree.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import random
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import click

from benchmarks.common import SEED
from benchmarks.process_cpu import tree_cpu_s

FUNCTIONS = "durable_map_functions"
"""Module that all sides import, from FOLDER."""
_SET_CHILD_SUBREAPER = 36
_CHUNKS = 4
"""Of each worker, where a side has to be told how many tasks go together."""


class Side(ABC):
    """A way to call a function with many items."""

    name: str
    keeps_workers = True
    """Those of a call serve the next one, too."""

    @contextlib.contextmanager
    def up(self, workers: int) -> Iterator[None]:
        """Inside, it can be used."""
        yield

    @abstractmethod
    def results(self, function: Callable[..., Any], items: Sequence[Any]) -> list[Any]:
        """Results of all items, in their order."""

    def groups(self, function: Callable[..., Any], path: Path) -> list[dict[str, float]]:
        """Results of all groups of a Parquet file by its column `group`: of those of pandas, unless a side has a way of its own."""
        import pandas as pd

        return self.results(function, [rows for _, rows in pd.read_parquet(path).groupby("group")])

    def details(self) -> dict[str, float]:
        """What else is known of the latest call."""
        return {}


class Durable(Side):
    """`map_items`: each call has functions of its own, which it starts and ends."""

    name = "map_items"
    keeps_workers = False

    @contextlib.contextmanager
    def up(self, workers: int) -> Iterator[None]:
        from ephemeron.maps import map_items

        self._map, self._workers, self._result = map_items, workers, None
        with tempfile.TemporaryDirectory() as folder:
            self._folder, self._calls = folder, 0
            yield

    def results(self, function: Callable[..., Any], items: Sequence[Any]) -> list[Any]:
        self._calls += 1
        self._result = self._map(function, items, results=f"{self._folder}/{self._calls}", max_workers=self._workers, progress=False)
        found = list(self._result)
        self._ended = time.time()
        return found

    def groups(self, function: Callable[..., Any], path: Path) -> list[dict[str, float]]:
        from ephemeron.maps import GroupModels, fit_groups

        out = f"{self._folder}/models"
        self._result = fit_groups(f"{FUNCTIONS}:fitted", path, by="group", out=out, max_workers=self._workers, progress=False)
        found = [row["metrics"] for row in GroupModels.open(out).rows()]
        self._ended = time.time()
        return found

    def details(self) -> dict[str, float]:
        """Seconds from the first recorded row to the last result in hand."""
        first = min(rows.column(0).cast("int64").to_numpy().min() for rows in self._result.parts(("recorded_at",))) / 1e6
        return {"from_first_row_s": self._ended - first}


class Executor(Side):
    """`FunctionExecutor.map` on functions that are up."""

    name = "FunctionExecutor"

    @contextlib.contextmanager
    def up(self, workers: int) -> Iterator[None]:
        from ephemeron.executor import FunctionExecutor

        with FunctionExecutor(max_workers=workers, idle_timeout_s=600.0, progress=False) as self._pool:
            yield

    def results(self, function: Callable[..., Any], items: Sequence[Any]) -> list[Any]:
        return list(self._pool.map(function, items))


class Processes(Side):
    """`concurrent.futures.ProcessPoolExecutor`.

    Args:
        is_chunked: a worker is given tasks in chunks, of which there are some for each.
    """

    def __init__(self, *, is_chunked: bool) -> None:
        self.name = f"ProcessPoolExecutor{', chunks' if is_chunked else ''}"
        self._is_chunked = is_chunked

    @contextlib.contextmanager
    def up(self, workers: int) -> Iterator[None]:
        self._workers = workers
        with ProcessPoolExecutor(workers) as self._pool:
            yield

    def results(self, function: Callable[..., Any], items: Sequence[Any]) -> list[Any]:
        chunk = max(1, len(items) // (_CHUNKS * self._workers)) if self._is_chunked else 1
        return list(self._pool.map(function, items, chunksize=chunk))


class Loky(Side):
    """joblib's default, processes of loky, to which it gives batches of a size that it finds by itself."""

    name = "joblib"

    @contextlib.contextmanager
    def up(self, workers: int) -> Iterator[None]:
        import joblib

        self._delayed = joblib.delayed
        with joblib.Parallel(n_jobs=workers) as self._parallel:
            yield

    def results(self, function: Callable[..., Any], items: Sequence[Any]) -> list[Any]:
        return list(self._parallel(self._delayed(function)(item) for item in items))


class Ray(Side):
    """Ray tasks, one for each item."""

    name = "Ray"

    @contextlib.contextmanager
    def up(self, workers: int) -> Iterator[None]:
        import ray

        ray.init("local", num_cpus=workers, include_dashboard=False, log_to_driver=False, configure_logging=False)
        self._ray = ray
        try:
            yield
        finally:
            ray.shutdown()

    def results(self, function: Callable[..., Any], items: Sequence[Any]) -> list[Any]:
        remote: Any = self._ray.remote(function)
        return list(self._ray.get([remote.remote(item) for item in items]))

    def groups(self, function: Callable[..., Any], path: Path) -> list[dict[str, float]]:
        import pandas as pd
        import ray.data

        ray.data.DataContext.get_current().enable_progress_bars = False
        rows = (
            ray.data.read_parquet(str(path)).groupby("group").map_groups(lambda rows: pd.DataFrame([function(rows)]), batch_format="pandas")
        )
        return list(rows.take_all())


class Dask(Side):
    """`dask.distributed` with processes of one thread."""

    name = "dask"

    @contextlib.contextmanager
    def up(self, workers: int) -> Iterator[None]:
        from distributed import Client, LocalCluster

        with (
            LocalCluster(n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=None, silence_logs=50) as cluster,
            Client(cluster) as self._client,
        ):
            yield

    def results(self, function: Callable[..., Any], items: Sequence[Any]) -> list[Any]:
        return list(self._client.gather(self._client.map(function, items, pure=False)))

    def groups(self, function: Callable[..., Any], path: Path) -> list[dict[str, float]]:
        import dask.dataframe as dd
        import pandas as pd

        rows, names = dd.read_parquet(path), list(function(pd.read_parquet(path).head(100)))
        found = rows.groupby("group").apply(lambda one: pd.Series(function(one)), meta=dict.fromkeys(names, float)).compute()
        return list(found.to_dict("records"))


def sides() -> list[Side]:
    """All sides. Those of libraries that are not installed raise `ImportError` when they are opened."""
    return [Durable(), Executor(), Processes(is_chunked=False), Processes(is_chunked=True), Loky(), Ray(), Dask()]


# -- loads --------------------------------------------------------------------------------------------------------


def skewed_s(count: int, longest_s: float) -> list[float]:
    """Zipf's times: the longest over 1, 2, 3, …, in random order."""
    times = [longest_s / rank for rank in range(1, count + 1)]
    random.Random(SEED).shuffle(times)
    return times


def items_of(load: str, count: int, amount: float) -> tuple[str, list[Any]]:
    """Name of the function of a load, and its items.

    Args:
        load: `empty`, `busy`, `sleep`, `skewed`, `payload`, `groups`.
        count: of tasks.
        amount: seconds of a task (of the longest one), or MB of its argument and of its result, or of the table of all groups.
    """
    if load == "empty":
        return "empty", list(range(count))
    if load == "payload":
        rng = random.Random(SEED)
        return "reverse", [rng.randbytes(int(amount * 1e6)) for _ in range(count)]
    times = skewed_s(count, amount) if load == "skewed" else [amount] * count
    return ("busy" if load == "busy" else "sleep"), [[n, seconds] for n, seconds in enumerate(times)]


def measure(side: Side, load: str, count: int, amount: float, workers: int) -> dict[str, float]:
    """Starts a side, calls one empty task, a few tasks of a load, and then all of them.

    Raises:
        ImportError: its library is not installed.
        AssertionError: it gives wrong results.
    """
    functions: Any = importlib.import_module(FUNCTIONS)
    with side.up(workers):
        assert side.results(functions.empty, [7]) == [7]
        first_at, first_cpu_s = time.monotonic(), tree_cpu_s()
        if load == "groups":
            cpu_s, began = tree_cpu_s(), time.monotonic()
            rows = side.groups(functions.fit, Path("groups.parquet"))
            ended = time.monotonic()
            assert len(rows) == count, f"{side.name} has fitted {len(rows)} groups"
            assert all(abs(row["x0"] - 1.0) < 0.5 for row in rows), f"{side.name} gives a wrong slope"
            return {
                "first_at": first_at,
                "first_cpu_s": first_cpu_s,
                "seconds": ended - began,
                "cpu_s": tree_cpu_s() - cpu_s,
                **side.details(),
            }
        name, items = items_of(load, count, amount)
        function = getattr(functions, name)
        if side.keeps_workers:  # all of them are up, and have the function
            side.results(function, items[: 4 * workers])
        cpu_s, began = tree_cpu_s(), time.monotonic()
        found = side.results(function, items)
        ended = time.monotonic()
        cpu_s = tree_cpu_s() - cpu_s
        assert len(found) == len(items), f"{side.name} gives {len(found)} results"
        for item, each in zip(items, found, strict=True):
            assert each == (function(item) if load in ("empty", "payload") else item[0]), f"{side.name} gives a wrong result"
        return {"first_at": first_at, "first_cpu_s": first_cpu_s, "seconds": ended - began, "cpu_s": cpu_s, **side.details()}


@click.command()
@click.option("--side", "name", required=True)
@click.option("--load", required=True)
@click.option("--count", type=int, required=True)
@click.option("--amount", type=float, required=True)
@click.option("--workers", type=int, required=True)
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="With the module of the functions.")
def main(name: str, load: str, count: int, amount: float, workers: int, folder: Path) -> None:
    """Measures one side once, and prints the figures as one line of JSON."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    ctypes.CDLL(None).prctl(_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    side = next(each for each in sides() if each.name == name)
    try:
        found: dict[str, Any] = measure(side, load, count, amount, workers)
    except ImportError as e:
        found = {"skipped": f"{e}"}
    json.dump(found, answer)
    answer.close()


if __name__ == "__main__":
    main()
