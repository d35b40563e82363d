"""The items of a durable map that have no row, on functions: what is submitted, what becomes of each, and when rows are stored."""

from __future__ import annotations

import contextlib
import heapq
import queue
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ephemeron.errors import BudgetReached, JobError, RunStopped, TaskFailed, UserError
from ephemeron.executor.executor import FunctionExecutor
from ephemeron.executor.futures import TaskFuture
from ephemeron.executor.programs import DurableMap, Program
from ephemeron.executor.session import Bill
from ephemeron.executor.shipping import TaskCode
from ephemeron.functions.tasks.item_calls import ItemOutcome
from ephemeron.maps.calls import Callee, arguments_of
from ephemeron.maps.estimate import LEAST, Enough
from ephemeron.maps.map_result import Failure, MapResult
from ephemeron.maps.outputs import ItemObjects
from ephemeron.maps.result_table import BEAT_S, ResultTable, Row, present_client
from ephemeron.maps.sources import Source, hex_of
from ephemeron.prices import Prices
from ephemeron.units import human_count

_FLUSH_S, _FLUSH_ROWS, _FLUSH_BYTES = 2.0, 20_000, 32 << 20
"""When rows are stored: after so long, so many, or so much."""
_FLUSH_SHARE = 0.05
"""Of the time, for that: where a flush takes long, there are fewer of them."""
_WINDOW, _WINDOW_PER_FUNCTION = 2_000, 200
"""Items that are submitted and have not ended, at most."""
_LOOK_S = 0.25
_BACKUP_TIMES, _BACKUP_LEAST_S = 3.0, 1.0
"""Where no task has ended for so many times the median of them, and at least so long, those at the end get a copy."""
_LEAST_TIMES, _MOST_COPIES = 5, 256
_MOST_FAILURES = 1000
"""That are kept in memory."""
_SHOWN = 10
"""Slowest and failed items that other clients see."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MapOptions:
    """How a map is done; see `map_items`."""

    key: str | None = None
    cost_column: str | None = None
    each_file: bool = False
    results: str | Path | None = None
    code_version: str = ""
    ignore_code_changes: bool = False
    retry_failed: bool = False
    forget_superseded: bool = False
    only: Sequence[str] = ()
    max_failures: int | str | None = None
    backup: bool = False
    max_per_second: float | None = None
    max_concurrent: int | None = None
    seed: int = 0
    stop_when: Enough | None = None
    estimate: str | None = None


@dataclass(slots=True)
class OpenItem:
    """An item that is submitted."""

    number: int
    """From 1."""
    id: bytes
    key: str
    item: str
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]]
    began_at: float = 0.0
    futures: list[TaskFuture] = field(default_factory=list)
    """Of its task, and of a copy."""
    copies: int = 0
    """Tasks that may still end, beside one."""
    is_done: bool = False

    @property
    def call(self) -> tuple[str, tuple[Any, ...], Mapping[str, Any]]:
        """As it is sent."""
        return (hex_of(self.id), *self.arguments)


def open_items(source: Source, callee: Callee, todo: NDArray[np.bool_]) -> Iterator[OpenItem]:
    """Items to compute: of each block the most expensive ones first."""
    for block in source.blocks(todo):
        wanted = np.flatnonzero(todo[block.first : block.first + len(block.ids)])
        if len(block.costs):
            wanted = wanted[np.argsort(-np.asarray(block.costs)[wanted], kind="stable")]
        for n in map(int, wanted):
            yield OpenItem(block.first + n + 1, bytes(block.ids[n]), block.key(n), block.items[n], arguments_of(block.value(n), callee))


class Computing:
    """Computes items, and records them.

    Args:
        function: as it is sent, or its name.
        callee: of it.
        table: of the results.
        options: of the map.
        executor: options of `FunctionExecutor`.
        objects: where the results go, if each is an object.
        takes_bytes: whether a result may be bytes.
        result: of the call, which is filled in.
        counts: items that have a row, and all of them.
        on_failure, on_note: see `map_items`.
        program: command that another client can give again.
    """

    def __init__(
        self,
        function: Callable[..., Any] | str,
        callee: Callee,
        table: ResultTable,
        options: MapOptions,
        *,
        executor: Mapping[str, Any],
        objects: ItemObjects | None,
        takes_bytes: bool,
        result: MapResult,
        counts: tuple[int, int],
        on_failure: Callable[[Failure], None],
        on_note: Callable[[str], None],
        program: Program | None,
    ) -> None:
        self._program = program
        self._function, self._callee, self._table, self._options = function, callee, table, options
        self._executor, self._objects, self._takes_bytes, self._result = executor, objects, takes_bytes, result
        self._done, self._of = counts
        self._on_failure, self._on_note = on_failure, on_note
        self._limit = failure_limit(options.max_failures, result.items)
        self._failed = 0
        self._items: dict[str, OpenItem] = {}
        """By task."""
        self._ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._times: deque[float] = deque(maxlen=1000)
        self._outgrown: list[OpenItem] = []
        """Items that need more memory than a function had."""
        self._estimate = result.estimate
        self._not_estimated = 0
        self._backed: set[bytes] = set()
        self._flushed_at = self._flush_s = self._ended_at = 0.0
        self._bills: list[Bill] = []
        self._began = time.monotonic()
        self._usd = 0.0
        """Of the items that it has computed."""
        self._slowest: list[tuple[float, int, dict[str, object]]] = []

    def _details(self) -> dict[str, object]:
        """What other clients see."""
        seconds = max(1e-9, time.monotonic() - self._began)
        return {
            "table": self._table.shown,
            "items": self._of,
            "recorded": self._result.recorded,
            "computed": self._result.computed,
            "items_per_s": round(self._result.computed / seconds, 3),
            "item_usd": self._usd / self._result.computed if self._result.computed else None,
            "slowest": [one for _, _, one in sorted(self._slowest, reverse=True, key=lambda each: each[:2])],
            "failed": [{"key": one.key, "error": one.error[:300]} for one in self._result.failures[:_SHOWN]],
            "failures": self._failed,
            "estimate": "" if self._estimate is None else str(self._estimate),
        }

    def _note(self) -> str:
        """For the progress bar."""
        return "" if self._estimate is None else str(self._estimate)

    def run(self, items: Iterator[OpenItem], *, again: str) -> None:
        """Computes items until all have a row, or it ends early.

        Args:
            items: without a row.
            again: run that is gone on with; empty: a new one.
        """
        memory_mb = self._executor.get("memory_mb")
        try:
            while True:
                memory_mb = self._with_memory(items, memory_mb, again)
                if memory_mb is None or self._result.cause:
                    break
                self._on_note(f"{human_count(len(self._outgrown), 'item')} needed more memory: once more with {memory_mb} MB")
                items, again = iter([replace(one, futures=[], copies=0) for one in self._outgrown]), ""
                self._outgrown = []
        except KeyboardInterrupt:
            self._stop("interrupted", "interrupt")
        except BudgetReached as e:
            self._stop(str(e), "budget")
        except RunStopped:
            self._stop("stopped", "stop")
        finally:
            self._result.bill = _total(self._bills)

    def _stop(self, why: str, cause: Any) -> None:
        self._result.stopped, self._result.cause = why, cause

    def _with_memory(self, items: Iterator[OpenItem], memory_mb: int | None, again: str) -> int | None:
        """Computes items on functions of one size. Returns that of functions for those that need more; None: there are none."""
        durable = DurableMap(
            table=self._table.shown,
            counts=lambda: (self._done, self._of),
            details=self._details,
            note=self._note,
            again=again,
            program=self._program,
        )
        options = {**self._executor, "memory_mb": memory_mb}
        if self._bills and options.get("budget_usd") is not None:
            options["budget_usd"] = max(1e-12, options["budget_usd"] - sum(bill.cost_usd for bill in self._bills))
        pool = FunctionExecutor(**options, durable=durable)
        try:
            with pool:
                code = pool.task_code(self._function)
                self._result.run = pool.folder.name
                self._table.remove_strays()
                self._flush(pool)
                self._stream(pool, code, items)
                if self._result.cause:
                    pool.shutdown(cancel_futures=True)
        finally:
            self._bills.append(pool.bill())
            self._drain(pool)
        return next_size(pool) if self._outgrown else None

    def _stream(self, pool: FunctionExecutor, code: TaskCode, items: Iterator[OpenItem]) -> None:
        window, more = _WINDOW + _WINDOW_PER_FUNCTION * pool.max_workers, True
        while more or self._items:
            while more and (room := window - len(self._items)) > 0:
                part = [one for _, one in zip(range(max(1, min(window // 4, room))), items)]  # noqa: B905 - the range is first: it takes no item too many
                more = bool(part)
                self._submit(pool, code, part)
            self._take(pool)
            if self._result.cause:
                return
            if self._options.backup and not more:
                self._back_up(pool, code)
            rows, nbytes = self._table.unflushed
            since_s = time.monotonic() - self._flushed_at
            is_due = rows and since_s > max(_FLUSH_S, self._flush_s / _FLUSH_SHARE)
            if is_due or rows >= _FLUSH_ROWS or nbytes >= _FLUSH_BYTES or since_s > BEAT_S:
                self._flush(pool)

    def _submit(self, pool: FunctionExecutor, code: TaskCode, items: Sequence[OpenItem], more: str = "") -> None:
        if not items:
            return
        o = self._options
        futures = pool.submit_items(
            code,
            [one.call for one in items],
            seed=o.seed if self._callee.has_rng else None,
            interval_s=pool.max_workers / o.max_per_second if o.max_per_second else 0.0,
            suffix=f".{self._callee.version}{'.r' if o.retry_failed else ''}{more}",
        )
        now = time.monotonic()
        for one, future in zip(items, futures, strict=True):
            one.began_at = now
            one.futures.append(future)
            self._items[future.task] = one
            future.add_done_callback(self._ended.put)

    def _take(self, pool: FunctionExecutor) -> None:
        """Takes in what has ended; waits a little where nothing has."""
        with contextlib.suppress(queue.Empty):
            future = self._ended.get(timeout=_LOOK_S)
            while True:
                self._absorb(pool, future)
                if self._result.cause or self._table.unflushed[1] >= _FLUSH_BYTES:
                    return
                future = self._ended.get_nowait()

    def _drain(self, pool: FunctionExecutor) -> None:
        """Records results that have come before it ended early: they are paid for."""
        with contextlib.suppress(queue.Empty):
            while True:
                future = self._ended.get_nowait()
                if not future.cancelled() and future.exception() is None:
                    self._absorb(pool, future)

    def _back_up(self, pool: FunctionExecutor, code: TaskCode) -> None:
        """Gives tasks at the end a copy when none has ended for long; of both the result that comes first counts. Those that share a batch with
        the slowest one, and may wait for it, are among them."""
        if len(self._times) < _LEAST_TIMES:
            return
        late_s = max(_BACKUP_LEAST_S, _BACKUP_TIMES * statistics.median(self._times))
        late = [one for one in self._items.values() if one.id not in self._backed]
        if not late or time.monotonic() - max(self._ended_at, max(one.began_at for one in late)) < late_s:
            return
        for one in late[:_MOST_COPIES]:
            self._backed.add(one.id)
            one.copies += 1
        self._submit(pool, code, late[:_MOST_COPIES], ".copy")
        self._result.backups += len(late[:_MOST_COPIES])

    # -- what becomes of an item -------------------------------------------------------------------------------

    def _absorb(self, pool: FunctionExecutor, future: TaskFuture) -> None:
        one = self._items.pop(future.task, None)
        if one is None or one.is_done:
            return
        try:
            outcome = ItemOutcome(*future.result())
        except CancelledError:
            return
        except TaskFailed as e:
            if one.copies:  # the other task may do it
                one.copies -= 1
            elif e.lost == "out_of_memory" and next_size(pool) is not None:
                self._outgrown.append(one)
            else:
                self._record(pool, one, future, failure=Failure(one.number, one.key, str(e), e.tries, e.traceback))
            return
        for other in one.futures:
            if other is not future:
                other.cancel()
        self._times.append(future.compute_s)
        self._ended_at = time.monotonic()
        text, data, refused = outcome.text or None, outcome.data, outcome.refused
        if not refused and self._objects is not None:
            try:
                text, data = self._objects.stored(one.key, text, data)
            except UserError as e:
                refused = str(e)
        elif data is not None and not self._takes_bytes:
            refused = "the result is bytes, which a file of results has not: write --out 'FOLDER/{key}.ENDING', an object for each item"
        if not refused and self._estimate is not None:
            refused = self._estimate.add(text or "null")
            self._not_estimated += bool(refused)
            if not self._estimate.count and self._not_estimated >= LEAST:
                self._stop(f"{LEAST} results and none to be estimated: {refused}", "other")
        if refused:
            self._record(pool, one, future, outcome, failure=Failure(one.number, one.key, refused, future.tries))
            return
        self._result.replaced += outcome.replaced
        self._record(pool, one, future, outcome, text=text, data=data)
        if self._estimate is not None and self._estimate.is_enough:
            self._stop("", "enough")

    def _record(
        self,
        pool: FunctionExecutor,
        one: OpenItem,
        future: TaskFuture,
        outcome: ItemOutcome | None = None,
        *,
        text: str | None = None,
        data: bytes | None = None,
        failure: Failure | None = None,
    ) -> None:
        one.is_done = True
        cost_usd = _cost(pool.prices, pool.memory_mb, future.compute_s)
        self._usd += cost_usd
        shown: dict[str, object] = {"key": _clean(one.key), "seconds": round(future.compute_s, 6), "cost_usd": cost_usd}
        entry = (future.compute_s, -one.number, shown)
        if len(self._slowest) < _SHOWN:
            heapq.heappush(self._slowest, entry)
        else:
            heapq.heappushpop(self._slowest, entry)
        self._table.add(
            Row(
                id=one.id,
                key=_clean(one.key),
                item=one.item,
                code=self._callee.version,
                status="ok" if failure is None else "failed",
                result=text,
                data=data,
                error=None if failure is None else _clean(failure.error),
                traceback=None if failure is None or not failure.traceback else _clean(failure.traceback),
                attempts=max(1, future.tries),
                function=future.executor,
                seconds=future.compute_s,
                cpu_seconds=0.0 if outcome is None else outcome.cpu_s,
                memory_mb=None if outcome is None else outcome.memory_mb,
                cost_usd=cost_usd,
                recorded_at=time.time(),
            )
        )
        self._result.computed += 1
        self._done += 1
        if failure is not None:
            self._fail(failure)

    def _fail(self, failure: Failure) -> None:
        self._failed += 1
        if len(self._result.failures) < _MOST_FAILURES:
            self._result.failures.append(failure)
        self._on_failure(failure)
        if self._failed > self._limit:
            self._stop(f"{human_count(self._failed, 'item')} failed, more than --max-failures {self._options.max_failures}", "failures")

    def _flush(self, pool: FunctionExecutor) -> None:
        began = time.monotonic()
        client = replace(present_client(pool.folder.name, done=self._done, of=self._of), code=self._callee.version)
        self._table.flush(function=self._callee.name, client=client)
        self._flushed_at = time.monotonic()
        self._flush_s = self._flushed_at - began


def next_size(pool: FunctionExecutor) -> int | None:
    """Memory of functions that have more of it than those of a pool, at least half as much again; None: there are none."""
    limits = pool.limits
    if limits.sizes_mb:
        return min((size for size in limits.sizes_mb if size >= 1.5 * pool.memory_mb), default=None)
    size = 2 * pool.memory_mb
    return size if size <= limits.memory_max_mb else None


def failure_limit(given: int | str | None, items: int) -> float:
    """Most items that may fail.

    Args:
        given: a number, or a share such as `5%`; None: no limit.
        items: of the map.

    Raises:
        JobError: it is neither.
    """
    if given is None:
        return float("inf")
    text = str(given).strip()
    with contextlib.suppress(ValueError):
        value = float(text.removesuffix("%"))
        if text.endswith("%") and 0 <= value <= 100:
            return value / 100 * items
        if not text.endswith("%") and value >= 0 and value == int(value):
            return value
    raise JobError(f"max_failures = {given!r} is no limit", remedy="write a number such as 10, or a share such as 5%")


def _cost(prices: Prices, memory_mb: int, seconds: float) -> float:
    return prices.functions_usd(seconds * memory_mb / 1024, 0)


def _total(bills: Sequence[Bill]) -> Bill | None:
    """The bill of all executors of a call."""
    if not bills:
        return None
    names = ("cost_usd", "functions_usd", "storage_usd", "invocations", "gb_seconds", "tasks")
    return replace(bills[-1], **{name: sum(getattr(bill, name) for bill in bills) for name in names})


def _clean(text: str) -> str:
    """Text that is UTF-8, whatever it was."""
    return text.encode("utf-8", "backslashreplace").decode()
