"""A durable map: a function with each item of a source, whose results are recorded once and kept, whatever ends the client.

    source ──items without a row──▶ tasks on functions ──outcomes──▶ rows of the table ──▶ file or objects, in the order of the items

An item that has a row of this version of the function is never computed again. Rows are flushed every few seconds. What functions have computed when the
client is killed stays in the queue of its run, and the next client on this machine goes on with that run.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import logging
import queue
import socket
import statistics
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ephemeron.config.paths import home
from ephemeron.config.typed import near
from ephemeron.errors import BudgetReached, JobError, RunStopped, TaskFailed, UserError
from ephemeron.executor.executor import FunctionExecutor
from ephemeron.executor.futures import TaskFuture
from ephemeron.executor.programs import DurableMap, is_going_on, survives
from ephemeron.executor.session import Bill
from ephemeron.functions.item_calls import ItemOutcome
from ephemeron.maps.calls import Callee, arguments_of, inspect_callee
from ephemeron.maps.outputs import ItemObjects, LineFile, check_file, is_folder, is_template, open_output, table_place
from ephemeron.maps.prediction import predict_items
from ephemeron.maps.result_table import BEAT_S, SILENT_S, Client, Known, ResultTable, Row, Whole, present_client
from ephemeron.maps.sources import Block, ItemColumns, Scan, Source, hex_of, open_source, scan
from ephemeron.prices import Prices
from ephemeron.runs import folders
from ephemeron.runs.folders import RESULT_FILE, RunFolder
from ephemeron.runs.header import read_header
from ephemeron.runs.lock import is_driven
from ephemeron.runs.predictions import Prediction
from ephemeron.units import human_count, human_seconds, human_usd

_log = logging.getLogger(__name__)

_FLUSH_S, _FLUSH_ROWS, _FLUSH_BYTES = 2.0, 20_000, 32 << 20
"""When rows are stored: after so long, so many, or so much."""
_FLUSH_SHARE = 0.05
"""Of the time, for that: where a flush takes long, there are fewer of them."""
_WINDOW, _WINDOW_PER_FUNCTION = 2_000, 200
"""Items that are submitted and have not ended, at most."""
_LOOK_S = 0.5
_BACKUP_TIMES, _BACKUP_LEAST_S = 3.0, 1.0
"""A task at the end that takes so many times the median of the others, and at least so long, gets a copy."""
_LEAST_TIMES = 5
_MOST_WHOLE = 8
_OUT_ROWS = 50_000


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
    only: Sequence[str] = ()
    max_failures: int | str | None = None
    backup: bool = False
    max_per_second: float | None = None
    max_concurrent: int | None = None
    seed: int = 0


@dataclass(slots=True)
class Failure:
    """An item without a result."""

    item: int
    """Number of the item, from 1."""
    key: str
    error: str
    tries: int = 1
    traceback: str = ""


@dataclass(slots=True)
class MapResult:
    """How a map has ended.

    Iterating gives the results in the order of the items, as JSON gives them back; None for items that have none.
    """

    items: int
    recorded: int
    """Items that had a row before."""
    computed: int = 0
    failed: int = 0
    """Items whose row is of a failure, those of earlier calls included."""
    missing: int = 0
    """Items without a row, since it ended early."""
    replaced: int = 0
    """NaN and infinite values of the results that are null."""
    stopped: str = ""
    """Why it ended early; empty: it did not."""
    cause: Literal["", "interrupt", "budget", "failures", "other"] = ""
    failures: list[Failure] = field(default_factory=list)
    """The first ones of this call."""
    run: str = ""
    """Name of its run; empty: no function was needed."""
    bill: Bill | None = None
    backups: int = 0
    seconds: float = 0.0
    table: ResultTable | None = None
    refused: int = 0
    """Results that the file cannot have."""
    _rows: NDArray[np.int64] | None = None
    """Of the table, by item; None: they were not needed."""
    _find: Callable[[], NDArray[np.int64]] | None = None

    def __iter__(self) -> Iterator[Any]:
        for rows in self.parts(("result", "data")):
            for result, data in zip(rows.column("result").to_pylist(), rows.column("data").to_pylist(), strict=True):
                yield data if data is not None else None if result is None else json.loads(result)

    def rows(self) -> Iterator[dict[str, Any]]:
        """The row of each item, in the order of the items; those without a row are left out."""
        for part in self.parts():
            yield from part.to_pylist()

    def parts(self, columns: Sequence[str] = Row._fields) -> Iterator[Any]:
        """The same as `pyarrow.Table`s."""
        assert self.table is not None
        if self._rows is None:
            assert self._find is not None
            self._rows = self._find()
        for at in range(0, len(self._rows), _OUT_ROWS):
            rows = self._rows[at : at + _OUT_ROWS]
            yield self.table.take(rows[rows >= 0], columns)


class DurableMapJob:
    """One call of a durable map.

    Args:
        function: as it is sent; its name where a command was given again.
        callee: of it.
        source: of the items.
        out: a file, a folder, the prefix of a bucket, or a template with `{key}`; None: only the table.
        place: address of the table.
        options: how.
        executor: options of `FunctionExecutor`.
        on_failure: called with each item that has failed.
        on_note: called with lines for the user.
    """

    def __init__(
        self,
        function: Callable[..., Any] | str,
        callee: Callee,
        source: Source,
        *,
        out: str | None,
        place: str,
        options: MapOptions,
        executor: Mapping[str, Any],
        on_failure: Callable[[Failure], None] = lambda failure: None,
        on_note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.function, self.callee, self.source, self.out, self.options = function, callee, source, out, options
        self._executor, self._on_failure, self._on_note = dict(executor), on_failure, on_note
        self._limit, self._share = _failure_limit("" if options.max_failures is None else str(options.max_failures))
        self._file: LineFile | None = None
        self._objects: ItemObjects | None = None
        if out is not None and is_template(out):
            self._objects = ItemObjects(out)
        elif out is not None and not is_folder(out):
            check_file(Path(out))
            self._file = open_output(Path(out))
        self.table = ResultTable.open(place)
        owner = self.table.state.function
        if owner and owner != callee.name:
            raise JobError(
                f"{self.table.shown} holds the results of {owner}, and this is {callee.name}",
                remedy="name another --out, or delete that folder",
            )
        self._futures: dict[str, _Open] = {}
        self._ended: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._times: deque[float] = deque(maxlen=1000)
        self._causes: Counter[str] = Counter()
        self._outgrown: list[tuple[_Open, Failure, TaskFuture]] = []
        """Items that need more memory than a function had."""
        self._flushed_at = self._flush_s = self._all_run_at = 0.0
        self._done = self._of = 0

    # -- the call ----------------------------------------------------------------------------------------------

    def predict(self, *, deadline_s: float | None = None) -> Prediction | None:
        """What it will take; None: no item is left to compute. Nothing is started.

        Args:
            deadline_s: see `predict_items`.
        """
        todo = self._todo(scan(self.source))
        if not todo.any():
            return None
        options = {name: value for name, value in self._executor.items() if name != "name"}
        return predict_items(self.function, self.callee, self.source, todo, seed=self.options.seed, deadline_s=deadline_s, **options)

    def plan(self, deadline_s: float) -> None:
        """Chooses the functions that meet a deadline.

        Raises:
            PlanInfeasible: none do.
        """
        if (found := self.predict(deadline_s=deadline_s)) is not None:
            self._executor |= {"max_workers": found.functions, "memory_mb": found.quota_mb}
            self._on_note(
                f"{human_count(found.functions, 'function')} of {found.quota_mb} MB: about {human_seconds(found.seconds or 0)}, "
                f"{human_usd(found.cost_usd or 0)}"
            )

    def run(self) -> MapResult:
        """Computes what has no row, and writes the results.

        Raises:
            JobError: items, the function or an option are refused; nothing was started.
            EphemeronError: the store of the table does not answer.
        """
        began = time.monotonic()
        try:
            result = self._run()
        finally:
            self.source.close()
        result.seconds = time.monotonic() - began
        return result

    def _run(self) -> MapResult:
        mark = self.source.fingerprint() if not self.options.only else ""
        again = self._other_client()
        whole = self._whole(mark)
        if whole is not None and self._is_written(whole):
            return MapResult(items=whole.items, recorded=whole.items, failed=whole.failed, table=self.table, _find=self._rows)
        found = scan(self.source)
        todo = self._todo(found)
        self._of, self._done = found.items, int(found.items - todo.sum())
        result = MapResult(items=found.items, recorded=int((self._known().find(found.ids)[0] >= 0).sum()), table=self.table)
        if todo.any():
            self._compute(result, found, todo, again)
        elif again:
            with contextlib.suppress(UserError):
                stop_client(again)
        return self._conclude(result, found, mark)

    def _rows(self) -> NDArray[np.int64]:
        """Number of the row of each item."""
        return self._known().find(scan(self.source).ids)[0]

    def _known(self) -> Known:
        return self.table.known(code=None if self.options.ignore_code_changes else self.callee.version)

    def _whole(self, mark: str) -> Whole | None:
        """What is known of a source that was computed whole, and is as it was."""
        o = self.options
        for one in self.table.state.whole:
            if (
                mark
                and one.source == mark
                and (o.ignore_code_changes or one.code == self.callee.version)
                and not (o.retry_failed and one.failed)
            ):
                return one
        return None

    def _is_written(self, whole: Whole) -> bool:
        return self._file is None or (bool(whole.out) and whole.out == _state_of(self._file.path))

    def _todo(self, found: Scan) -> NDArray[np.bool_]:
        """Which items are to be computed."""
        rows, failed = self._known().find(found.ids)
        todo = (rows < 0) | (failed & self.options.retry_failed)
        if self.options.only:
            todo &= self._chosen(found)
        return todo & found.is_first

    def _chosen(self, found: Scan) -> NDArray[np.bool_]:
        chosen = np.zeros(found.items, bool)
        only = frozenset(self.options.only)
        left = set(only)
        for block in self.source.blocks():
            for n in range(len(block.ids)):
                if (key := block.key(n)) in only:
                    chosen[block.first + n] = True
                    left.discard(key)
        if left:
            raise JobError(f"no item has the key {sorted(left)[0]!r:.80}", remedy="see the column `key` of the table of results")
        return chosen

    # -- other clients -----------------------------------------------------------------------------------------

    def _other_client(self) -> str:
        """Waits while another client works on the table; returns a run of this machine whose client was killed, if there is one."""
        is_told = False
        while True:
            client = self.table.state.client
            if not client.run or is_going_on():
                return ""
            folder = RunFolder(folders.runs_folder() / client.run)
            if client.host == socket.gethostname():
                if not is_driven(folder):
                    header = read_header(folder)
                    return client.run if header is not None and survives(header) and not (folder.path / RESULT_FILE).exists() else ""
            elif time.time() - client.seen_at > SILENT_S:
                return ""
            if not is_told:
                is_told = True
                self._on_note(f"{client.run} on {client.host} works on it: this call waits for it, and goes on if it ends early")
            time.sleep(_LOOK_S)
            self.table.refresh()

    # -- computing ---------------------------------------------------------------------------------------------

    def _compute(self, result: MapResult, found: Scan, todo: NDArray[np.bool_], again: str) -> None:
        if again and not self._is_same(again):
            with contextlib.suppress(UserError):
                stop_client(again)
            again = ""
        left = self._calls(todo, found.has_costs)
        memory_mb = self._executor.get("memory_mb")
        bills: list[Bill] = []
        try:
            while True:
                memory_mb = self._with_memory(result, left, memory_mb, again, bills)
                if memory_mb is None or result.stopped:
                    break
                self._on_note(f"{human_count(len(self._outgrown), 'item')} needed more memory: once more with {memory_mb} MB")
                left, again = iter([_again(one) for one, _, _ in self._outgrown]), ""
                self._outgrown = []
        except KeyboardInterrupt:
            result.stopped, result.cause = "interrupted", "interrupt"
        except BudgetReached as e:
            result.stopped, result.cause = str(e), "budget"
        except RunStopped:
            result.stopped, result.cause = "stopped", "other"
        result.bill = _total(bills)

    def _with_memory(self, result: MapResult, left: Iterator[_Open], memory_mb: int | None, again: str, bills: list[Bill]) -> int | None:
        """Computes items on functions of one size. Returns that of functions for those that need more; None: there are none."""
        durable = DurableMap(table=self.table.shown, counts=lambda: (self._done, self._of), again=again)
        options = {**self._executor, "memory_mb": memory_mb}
        if bills and options.get("budget_usd") is not None:
            options["budget_usd"] = max(1e-12, options["budget_usd"] - sum(bill.cost_usd for bill in bills))
        with FunctionExecutor(**options, durable=durable) as pool:
            shipment = pool.shipment(self.function)
            result.run = pool.folder.name
            self.table.remove_strays()
            self._flush(result.run)
            try:
                self._stream(pool, shipment, result, left)
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
            finally:
                bills.append(pool.bill())
            if result.stopped:
                pool.shutdown(cancel_futures=True)
        bills[-1] = pool.bill()
        return _next_size(pool) if self._outgrown else None

    def _is_same(self, run: str) -> bool:
        """Whether a run was of this version of the function."""
        state = self.table.state
        return bool(state.client.run == run and state.client.code == self.callee.version)

    def _stream(self, pool: FunctionExecutor, shipment: Any, result: MapResult, left: Iterator[_Open]) -> None:
        window = _WINDOW + _WINDOW_PER_FUNCTION * pool.max_workers
        rate = self.options.max_per_second
        interval_s = pool.max_workers / rate if rate else 0.0
        suffix = f".{self.callee.version}" + (".r" if self.options.retry_failed else "")
        seed = self.options.seed if self.callee.has_rng else None
        more = True
        backed: set[str] = set()
        while more or self._futures:
            while more and len(self._futures) < window:
                part = [one for _, one in zip(range(max(1, min(window // 4, window - len(self._futures)))), left)]  # noqa: B905
                more = bool(part)
                if not part:
                    break
                futures = pool.submit_items(
                    shipment, [(one.name, *one.arguments) for one in part], seed=seed, interval_s=interval_s, suffix=suffix
                )
                for one, future in zip(part, futures, strict=True):
                    one.began_at = time.monotonic()
                    one.futures.append(future)
                    self._futures[future.task] = one
                    future.add_done_callback(self._ended.put)
            self._take(pool, result)
            if result.stopped:
                return
            if self.options.backup and not more:
                self._back_up(pool, shipment, result, seed, interval_s, suffix, backed)
            self._flush_if_due(pool, result)

    def _take(self, pool: FunctionExecutor, result: MapResult) -> None:
        """Takes outcomes, at least one, if there is one soon."""
        try:
            future = self._ended.get(timeout=_LOOK_S)
        except queue.Empty:
            return
        while True:
            self._absorb(pool, result, future)
            if result.stopped:
                return
            try:
                future = self._ended.get_nowait()
            except queue.Empty:
                return

    def _absorb(self, pool: FunctionExecutor, result: MapResult, future: TaskFuture) -> None:
        one = self._futures.pop(future.task, None)
        if one is None or one.is_done:
            return
        try:
            outcome = ItemOutcome(*future.result())
        except CancelledError:
            return
        except TaskFailed as e:
            if one.copies:  # the other copy may do it
                one.copies -= 1
                return
            failure = Failure(one.number, one.key, str(e), e.tries, e.traceback)
            if e.lost == "out_of_memory" and _next_size(pool) is not None:
                self._outgrown.append((one, failure, future))
            else:
                self._fail(result, one, failure, future, pool)
            return
        one.is_done = True
        for other in one.futures:
            if other is not future:
                other.cancel()
        self._times.append(future.compute_s)
        content, text = outcome.data, outcome.text or None
        refused = outcome.refused
        if not refused and self._objects is not None:
            try:
                text, content = json.dumps(self._objects.put(one.key, (text or "").encode() if content is None else content)), None
            except UserError as e:
                refused = str(e)
        elif not refused and content is not None and self._file is not None:
            refused = "the result is bytes, which a file of results has not: write --out FOLDER/{key}.ENDING, an object for each item"
        if refused:
            self._fail(result, one, Failure(one.number, one.key, refused, future.tries), future, pool, outcome)
            return
        result.replaced += outcome.replaced
        self._record(result, one, future, pool, result_text=text, data=content, outcome=outcome)

    def _fail(
        self,
        result: MapResult,
        one: _Open,
        failure: Failure,
        future: TaskFuture,
        pool: FunctionExecutor,
        outcome: ItemOutcome | None = None,
    ) -> None:
        one.is_done = True
        if len(result.failures) < 1000:
            result.failures.append(failure)
        self._causes[failure.error] += 1
        self._record(result, one, future, pool, failure=failure, outcome=outcome)
        self._on_failure(failure)
        failed = sum(self._causes.values())
        if self._limit is not None and failed > self._limit:
            result.stopped, result.cause = (
                f"{human_count(failed, 'item')} have failed, more than --max-failures {self.options.max_failures}",
                "failures",
            )
        elif self._share is not None and failed > self._share * result.items:
            result.stopped, result.cause = (
                f"{failed} of {human_count(result.items, 'item')} have failed, more than --max-failures {self.options.max_failures}",
                "failures",
            )

    def _record(
        self,
        result: MapResult,
        one: _Open,
        future: TaskFuture,
        pool: FunctionExecutor,
        *,
        result_text: str | None = None,
        data: bytes | None = None,
        failure: Failure | None = None,
        outcome: ItemOutcome | None = None,
    ) -> None:
        self.table.add(
            Row(
                id=one.id,
                key=_clean(one.key),
                item=one.item,
                code=self.callee.version,
                status="ok" if failure is None else "failed",
                result=result_text,
                data=data,
                error=None if failure is None else _clean(failure.error),
                traceback=None if failure is None or not failure.traceback else _clean(failure.traceback),
                attempts=max(1, future.tries),
                function=future.executor,
                seconds=future.compute_s,
                cpu_seconds=0.0 if outcome is None else outcome.cpu_s,
                memory_mb=None if outcome is None else outcome.memory_mb,
                cost_usd=_cost(pool.prices, pool.memory_mb, future.compute_s),
                recorded_at=time.time(),
            )
        )
        result.computed += 1
        self._done += 1

    def _flush_if_due(self, pool: FunctionExecutor, result: MapResult) -> None:
        rows, nbytes = self.table.unflushed
        since_s = time.monotonic() - self._flushed_at
        is_due = rows and since_s > max(_FLUSH_S, self._flush_s / _FLUSH_SHARE)
        if is_due or rows >= _FLUSH_ROWS or nbytes >= _FLUSH_BYTES or since_s > BEAT_S:
            self._flush(pool.folder.name)

    def _flush(self, run: str) -> None:
        began = time.monotonic()
        client = replace(present_client(run, done=self._done, of=self._of), code=self.callee.version)
        self.table.flush(function=self.callee.name, client=client)
        self._flushed_at = time.monotonic()
        self._flush_s = self._flushed_at - began

    def _back_up(
        self, pool: FunctionExecutor, shipment: Any, result: MapResult, seed: int | None, interval_s: float, suffix: str, backed: set[str]
    ) -> None:
        """Gives the slowest tasks at the end a copy; the result that comes first counts."""
        now, idle = time.monotonic(), pool.max_workers - len(self._futures)
        if idle < 0:
            self._all_run_at = now  # at the latest: none waits any more
        if idle <= 0 or len(self._times) < _LEAST_TIMES:
            return
        late_s = max(_BACKUP_LEAST_S, _BACKUP_TIMES * statistics.median(self._times))
        late = [one for one in self._futures.values() if one.name not in backed and now - max(one.began_at, self._all_run_at) > late_s]
        for one in late[:idle]:
            backed.add(one.name)
            call = (one.name, *one.arguments)
            [copy] = pool.submit_items(shipment, [call], seed=seed, interval_s=interval_s, suffix=f"{suffix}.copy")
            one.copies += 1
            one.futures.append(copy)
            self._futures[copy.task] = one
            copy.add_done_callback(self._ended.put)
            result.backups += 1

    def _calls(self, todo: NDArray[np.bool_], has_costs: bool) -> Iterator[_Open]:
        """Items to compute: of each block the most expensive ones first."""
        c = self.callee
        for block in self.source.blocks():
            wanted = np.flatnonzero(todo[block.first : block.first + len(block.ids)])
            if has_costs:
                wanted = wanted[np.argsort(-np.asarray(block.costs)[wanted], kind="stable")]
            for n in map(int, wanted):
                yield _open_item(block, n, c)

    # -- the end -----------------------------------------------------------------------------------------------

    def _conclude(self, result: MapResult, found: Scan, mark: str) -> MapResult:
        if self.table.unflushed[0] or self.table.state.client.run:
            self.table.flush(client=Client())
        rows, failed = self._known().find(found.ids)
        result._rows = rows
        result.failed, result.missing = int((failed & (rows >= 0)).sum()), int((rows < 0).sum())
        if self._file is not None:
            self._write(result, rows)
        if mark and not result.missing:
            others = [one for one in self.table.state.whole if (one.source, one.code) != (mark, self.callee.version)]
            out = "" if self._file is None or result.refused else _state_of(self._file.path)
            one = Whole(source=mark, code=self.callee.version, items=result.items, failed=result.failed, out=out)
            self.table.flush(whole=(*others, one)[-_MOST_WHOLE:])
        return result

    def _write(self, result: MapResult, rows: NDArray[np.int64]) -> None:
        """Writes the results in the order of the items; null where there is none."""
        assert self._file is not None
        with self._file.opened():
            for at in range(0, len(rows), _OUT_ROWS):
                part = rows[at : at + _OUT_ROWS]
                there = np.flatnonzero(part >= 0)
                texts: list[str | None] = [None] * len(part)
                for place, text in zip(there, self.table.take(part[there], ("result",)).column(0).to_pylist(), strict=True):
                    texts[place] = text
                for n, why in self._file.write_texts(texts):
                    result.refused += 1
                    self._on_failure(Failure(at + n + 1, "", why))


@dataclass(slots=True)
class _Open:
    """An item that was submitted."""

    number: int
    id: bytes
    name: str
    key: str
    item: str
    arguments: tuple[tuple[Any, ...], Mapping[str, Any]]
    began_at: float = 0.0
    futures: list[TaskFuture] = field(default_factory=list)
    copies: int = 0
    """That may still end, beside one."""
    is_done: bool = False


def _open_item(block: Block, n: int, callee: Callee) -> _Open:
    id = bytes(block.ids[n])
    return _Open(block.first + n + 1, id, hex_of(id), block.key(n), block.items[n], arguments_of(block.value(n), callee))


def _again(one: _Open) -> _Open:
    return replace(one, futures=[], copies=0, is_done=False)


def _next_size(pool: FunctionExecutor) -> int | None:
    """Memory of functions that have more of it than those of a pool, at least half as much again; None: there are none."""
    limits = pool.limits
    if limits.sizes_mb:
        return min((size for size in limits.sizes_mb if size >= 1.5 * pool.memory_mb), default=None)
    size = 2 * pool.memory_mb
    return size if size <= limits.memory_max_mb else None


def _total(bills: Sequence[Bill]) -> Bill | None:
    """The bill of all executors of a call."""
    if not bills:
        return None
    names = ("cost_usd", "functions_usd", "storage_usd", "invocations", "gb_seconds", "tasks")
    return replace(bills[-1], **{name: sum(getattr(bill, name) for bill in bills) for name in names})


def stop_client(run: str) -> None:
    """Ends what functions of a run still do whose client was killed.

    Raises:
        UserError: there is nothing to end.
    """
    from ephemeron.runs.verbs import stop

    stop(run, now=True)


def _cost(prices: Prices, memory_mb: int, seconds: float) -> float:
    return prices.functions_usd(seconds * memory_mb / 1024, 0)


def _state_of(path: Path) -> str:
    try:
        state = path.stat()
    except OSError:
        return ""
    return f"{state.st_size}-{state.st_mtime_ns}"


def _clean(text: str) -> str:
    """Text that is UTF-8, whatever it was."""
    return text.encode("utf-8", "backslashreplace").decode()


def _failure_limit(text: str) -> tuple[int | None, float | None]:
    """Most failures, as a number or as a share of the items."""
    if not text:
        return None, None
    is_share = text.endswith("%")
    try:
        value = float(text.removesuffix("%"))
        if value < 0 or (is_share and value > 100) or (not is_share and value != int(value)):
            raise ValueError
    except ValueError:
        raise JobError(f"max_failures = {text!r} is no limit", remedy="write a number such as 10, or a share such as 5%") from None
    return (None, value / 100) if is_share else (int(value), None)


# -- the function of the package ----------------------------------------------------------------------------------


def map_items(
    function: Callable[..., Any] | str,
    items: Any,
    *,
    out: str | Path | None = None,
    key: str | None = None,
    cost_column: str | None = None,
    each_file: bool = False,
    results: str | Path | None = None,
    code_version: str = "",
    ignore_code_changes: bool = False,
    retry_failed: bool = False,
    only: Sequence[str] = (),
    max_failures: int | str | None = None,
    backup: bool = False,
    max_per_second: float | None = None,
    max_concurrent: int | None = None,
    seed: int = 0,
    deadline_s: float | None = None,
    on_failure: Callable[[Failure], None] = lambda failure: None,
    on_note: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> MapResult:
    """Calls a function with each item, on functions, and records each result once: given again, only what has no result is computed.

    Args:
        function: as for `FunctionExecutor.map`. It is given the item, or, if it has several arguments, the parts of the item by their names;
            `rng`, if it has that argument, is a `numpy.random.Generator` of the seed and the item alone.
        items: a path, a wildcard or a URL of JSON lines, of tables, or of files that are items themselves; or an iterable.
        out: file (`.jsonl`, `.csv`, `.tsv`, `.parquet`) with the results in the order of the items; a folder or `s3://bucket/prefix` for
            the table of results alone; `FOLDER/{key}.png` for an object per item. None: a table below the home folder.
        key: column or key of an item that names it. None: a digest of its value.
        cost_column: column with the cost of an item: expensive ones are begun first.
        each_file: files of tables are items, too.
        results: folder or URL of the table of results. None: beside `out`.
        code_version: in place of a digest of the function's sources.
        ignore_code_changes: results of other versions of the function count.
        retry_failed: items that have failed before are computed again.
        only: keys of the items that are computed.
        max_failures: number, or share such as `"5%"`, of failed items above which it ends.
        backup: the slowest tasks at the end get a copy, which is paid for, too.
        max_per_second: calls begun in a second by all functions together, at most.
        max_concurrent: functions at once, at most.
        seed: of `rng`.
        deadline_s: in which it is to be done: the number and memory of functions are chosen, by calling the function with some items here.
        on_failure, on_note: called with each item that fails, and with lines for the user.
        options: of `FunctionExecutor`.

    Raises:
        JobError: items, function or an option are refused; nothing was started.
        PlanInfeasible: no functions meet the deadline.
        EphemeronError: a store does not answer.
    """
    chosen = MapOptions(
        key=key,
        cost_column=cost_column,
        each_file=each_file,
        results=results,
        code_version=code_version,
        ignore_code_changes=ignore_code_changes,
        retry_failed=retry_failed,
        only=only,
        max_failures=max_failures,
        backup=backup,
        max_per_second=max_per_second,
        max_concurrent=max_concurrent,
        seed=seed,
    )
    job = open_map(function, items, out=out, options=chosen, executor=options, on_failure=on_failure, on_note=on_note)
    if deadline_s is not None:
        job.plan(deadline_s)
    return job.run()


def open_map(
    function: Callable[..., Any] | str,
    items: Any,
    *,
    out: str | Path | None = None,
    options: MapOptions,
    executor: Mapping[str, Any],
    on_failure: Callable[[Failure], None] = lambda failure: None,
    on_note: Callable[[str], None] = lambda text: None,
    callee: Callee | None = None,
) -> DurableMapJob:
    """A map that has not begun; see `map_items`.

    Args:
        executor: options of `FunctionExecutor`.
        callee: of a command that is given again, where its function may not be.
    """
    o, executor = options, {"name": "map", **executor}
    if o.max_per_second is not None and not 0 < o.max_per_second < float("inf"):
        raise JobError(f"max_per_second = {o.max_per_second} is not above 0")
    if o.max_concurrent is not None:
        if o.max_concurrent < 1:
            raise JobError(f"max_concurrent = {o.max_concurrent} is below 1")
        executor["max_workers"] = min(o.max_concurrent, executor.get("max_workers") or o.max_concurrent)
    _check_options(executor)
    if callee is None:
        function, callee = inspect_callee(function, code=executor.get("code", ()), version=o.code_version, seed=o.seed)
    source = open_source(items, ItemColumns(key=o.key, cost=o.cost_column, needed=callee.needed), each_file=o.each_file)
    if o.results is not None:
        place = table_place(f"{str(o.results).rstrip('/')}/", "")
    else:
        own = home() / "maps" / f"{callee.name.replace(':', '.')}-{_digest(callee.name, source.name, str(o.key))}"
        place = table_place(None if out is None else str(out), str(own))
    return DurableMapJob(
        function,
        callee,
        source,
        out=None if out is None else str(out),
        place=place,
        options=o,
        executor=executor,
        on_failure=on_failure,
        on_note=on_note,
    )


def _check_options(options: Mapping[str, Any]) -> None:
    known = set(inspect.signature(FunctionExecutor.__init__).parameters) - {"self", "durable"}
    for option in options:
        if option not in known:
            raise JobError(f"no option {option!r}", remedy=near(option, known, what="options"))


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "backslashreplace"), digest_size=6).hexdigest()
