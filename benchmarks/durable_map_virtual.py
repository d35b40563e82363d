"""The part `virtual` of `benchmarks.durable_map`: durable maps on simulated functions, killed at random in virtual time.

Items take about a second (log-normal). At random times functions that run are killed. The client, too, ends at random, when it stores rows: before,
in the midst or after, and the map is given again. The simulated store lives in the client's process, so what functions had recorded there and the
client had not stored is computed again; it is counted apart. All times are simulated.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.common import SEED
from benchmarks.durable_map_sides import FUNCTIONS
from ephemeron.errors import InvocationRefused
from ephemeron.functions import simulated
from ephemeron.functions.base import Outcome
from ephemeron.functions.world import ComputeModel, Simulation
from ephemeron.maps import computing, map_items
from ephemeron.maps.result_table import ResultTable, _table

ITEM_S, SIGMA, MEMORY_MB = 1.0, 0.5, 1024
CLIENT_DEATHS = 4
"""Of a map."""
WRONG = ("keys_without_row", "keys_with_several_rows", "recorded_and_computed_again", "wrong_results")


class ClientKilled(BaseException):
    """The client is gone: nothing of it may catch this."""


class VirtualKills:
    """Maps under kills in virtual time.

    Args:
        items: of a map.
        points: functions that are killed in a map.
        runs: maps.
        place: folder with the module of the functions.
        at_once: functions.
        trouble: share of the invocations that are throttled, and of those that run twice.
    """

    def __init__(self, items: int, points: int, runs: int, place: Path, *, at_once: int = 20, trouble: float = 0.0) -> None:
        self._items, self._points, self._runs, self._place = items, points, runs, place
        self._at_once, self._trouble = at_once, trouble
        self._rng = random.Random(SEED)

    def run(self) -> dict[str, Any]:
        """All maps; after an interrupt, those that have ended."""
        sums: Counter[str] = Counter()
        done = 0
        with contextlib.chdir(self._place), contextlib.suppress(KeyboardInterrupt):
            sys.path.insert(0, str(self._place))
            try:
                for n in range(self._runs):
                    sums.update(found := self._one(n))
                    done = n + 1
                    print(f"virtual {n}: {dict(found)}", file=sys.stderr)
            finally:
                sys.path.remove(str(self._place))
        needed = done * self._items + sums["computed_again_after_client_deaths"]
        counted = (*WRONG, "throttled", "duplicates", "function_kills", "client_deaths", "calls", "computed_again_after_client_deaths")
        return {
            "is_right": not any(sums[name] for name in WRONG),
            "simulated": True,
            "maps": done,
            "items": self._items,
            "functions": self._at_once,
            "item_s": ITEM_S,
            **{name: sums[name] for name in counted},
            "repeated": sums["calls"] - needed,
            "repeated_share": round((sums["calls"] - needed) / sums["calls"], 5),
        }

    def _one(self, n: int) -> Counter[str]:
        out, log = f"out{n}.jsonl", self._place / f"calls{n}.txt"
        table = (self._place / f"{out}.results").as_uri()
        items = [{"n": str(k), "log": str(log)} for k in range(self._items)]
        model = ComputeModel(a=ITEM_S * MEMORY_MB, b=0.0, m=0.0)
        found: Counter[str] = Counter()
        deaths = sorted(self._rng.sample(range(1, 8 * CLIENT_DEATHS), CLIENT_DEATHS))
        before = 0
        while True:
            recorded, calls = set(_keys(table)), len(_called(log))
            flushes, before = (deaths[0] - before, deaths[0]) if deaths else (0, before)
            result = None
            with (
                _function_kills(self._rng, self._items * ITEM_S / self._at_once / self._points, self._points, found, self._trouble),
                _client_dies(self._rng, flushes),
                contextlib.suppress(ClientKilled),
            ):
                result = map_items(
                    f"{FUNCTIONS}:counted",
                    items,
                    key="n",
                    out=out,
                    platform="simulated",
                    max_workers=self._at_once,
                    memory_mb=MEMORY_MB,
                    simulation=Simulation(compute=model, straggler_sigma=SIGMA),
                    retries=20,
                    progress=False,
                )
            found["recorded_and_computed_again"] += sum(key in recorded for key in _called(log)[calls:])
            if result is not None and result.cause == "interrupt":
                raise KeyboardInterrupt
            if result is not None:
                break
            deaths.pop(0)
            found["client_deaths"] += 1
            found["computed_again_after_client_deaths"] += len(set(_called(log)[calls:]) - set(_keys(table)))
        rows = Counter(_keys(table))
        found["calls"] = len(_called(log))
        found["keys_without_row"] = self._items - len(rows)
        found["keys_with_several_rows"] = sum(count > 1 for count in rows.values())
        found["wrong_results"] = sum(value != k for k, value in enumerate(result))
        return found


def _keys(table: str) -> list[str]:
    return [key for part in ResultTable.open(table).scan(("key",)) for key in part.column(0).to_pylist()]


def _called(log: Path) -> list[str]:
    return log.read_text().split() if log.exists() else []


@contextlib.contextmanager
def _function_kills(rng: random.Random, mean_s: float, most: int, found: Counter[str], trouble: float) -> Iterator[None]:
    """Kills functions that run, with exponential pauses of a mean, in virtual time; `most` of all calls together. So many invocations are refused, and
    so many run twice."""
    usual = simulated.SimulatedPlatform

    class Killing(usual):  # type: ignore[misc, valid-type]
        _killer: asyncio.Task[None] | None = None

        async def invoke(self, call: Any) -> Any:
            if self._killer is None:
                self._killer = asyncio.create_task(self._kill())
            if rng.random() < trouble:
                found["throttled"] += 1
                raise InvocationRefused("too many requests", binding="concurrency")
            is_twice = rng.random() < trouble
            found["duplicates"] += is_twice
            return await super().invoke(replace(call, duplicate=is_twice))

        async def _kill(self) -> None:
            while found["function_kills"] < most:
                await asyncio.sleep(rng.expovariate(1 / mean_s))
                if self._running:
                    found["function_kills"] += 1
                    rng.choice(list(self._running.values()))._kill(Outcome(status="lost", error="killed"))

        async def close(self) -> None:
            if self._killer is not None:
                self._killer.cancel()
            await super().close()

    simulated.SimulatedPlatform = Killing  # type: ignore[misc]
    try:
        yield
    finally:
        simulated.SimulatedPlatform = usual  # type: ignore[misc]


@contextlib.contextmanager
def _client_dies(rng: random.Random, flushes: int) -> Iterator[None]:
    """Ends the client at its n-th store of rows; 0: not at all."""
    usual, usual_s, left = ResultTable.flush, computing._FLUSH_S, flushes

    def flush(self: ResultTable, **changes: Any) -> None:
        nonlocal left
        if not self.unflushed[0] or (left := left - 1) != 0:
            return usual(self, **changes)
        how = rng.choice(("before", "midst", "after"))
        if how == "midst":
            self._store(_table(self._rows))
        elif how == "after":
            usual(self, **changes)
        raise ClientKilled

    ResultTable.flush, computing._FLUSH_S = flush, 0.2  # type: ignore[method-assign]
    try:
        yield
    finally:
        ResultTable.flush, computing._FLUSH_S = usual, usual_s  # type: ignore[method-assign]
