"""A durable map: a function with each item of a source, whose results are recorded once and kept, whatever ends the client.

    source ──items without a row──▶ tasks on functions ──outcomes──▶ rows of the table ──▶ file or objects, in the order of the items

An item that has a row of this version of the function is never computed again. Rows are flushed every few seconds. What functions have computed when the
client is killed stays in the queue of its run, and the next client on this machine goes on with that run.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from numpy.typing import NDArray

from ephemeron.config.code_bundle import Selection
from ephemeron.config.paths import home, located
from ephemeron.config.typed import near
from ephemeron.errors import JobError, TableTaken, UserError
from ephemeron.executor.environment import version_of, with_environment
from ephemeron.executor.executor import FunctionExecutor
from ephemeron.executor.programs import Program, is_going_on, survives
from ephemeron.functions.registry import CLOUDS
from ephemeron.maps.calls import Callee, inspect_callee
from ephemeron.maps.computing import Computing, MapOptions, failure_limit, open_items
from ephemeron.maps.estimate import Enough, Estimate
from ephemeron.maps.map_result import Failure, MapResult, rows_of_part
from ephemeron.maps.outputs import ItemObjects, LineFile, check_file, is_folder, is_template, open_output, table_place
from ephemeron.maps.prediction import predict_items
from ephemeron.maps.result_table import ID_BYTES, SILENT_S, Client, Known, ResultTable, Whole
from ephemeron.maps.sources import ItemColumns, Scan, Source, open_source, scan
from ephemeron.runs import folders
from ephemeron.runs.folders import RunFolder
from ephemeron.runs.header import read_header
from ephemeron.runs.lock import is_driven
from ephemeron.runs.predictions import Prediction
from ephemeron.runs.summary import read_summary
from ephemeron.runs.verbs import stop
from ephemeron.units import human_bytes, human_count, human_seconds, human_usd

_LOOK_S = 0.5
"""Between two looks at a table on which another client works."""
_MOST_WHOLE = 8
"""Sources of which a table knows that they are whole."""


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
        program: command that another client can give again.
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
        program: Program | None = None,
    ) -> None:
        self._program = program
        self._known_at: tuple[int, Known] | None = None
        """Rows of the table, and the number of its state then."""
        self._whole_now: Whole | None = None
        """What is known of the source when it was computed whole."""
        self.function, self.callee, self.source, self.out, self.options = function, callee, source, out, options
        self._executor, self._on_failure, self._on_note = dict(executor), on_failure, on_note
        failure_limit(options.max_failures, 0)
        if options.stop_when is not None:
            Estimate(options.stop_when)
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

    @property
    def requirements(self) -> str | Path | None:
        """File of what its functions need, named or found; None: there is none."""
        return self._executor.get("requirements")

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
            if self.options.forget_superseded:
                self._forget(result)
        finally:
            self.source.close()
        result.seconds = time.monotonic() - began
        return result

    def _run(self) -> MapResult:
        o = self.options
        mark = "" if o.only or o.stop_when is not None else self.source.fingerprint()
        again = self._other_client()
        whole = self._whole(mark)
        if whole is not None and self._is_written(whole):
            self._whole_now = whole
            return MapResult(items=whole.items, recorded=whole.items, failed=whole.failed, table=self.table, _find=self._rows)
        found = scan(self.source)
        todo = self._todo(found)
        result = MapResult(items=found.items, recorded=int((self._known().find(found.ids)[0] >= 0).sum()), table=self.table)
        if o.stop_when is not None:
            result.estimate = self._recorded_estimate(found)
            if result.estimate.is_enough:
                result.cause, todo = "enough", np.zeros(len(todo), bool)
        if again and not (todo.any() and self.table.state.client.code == self.callee.version):
            with contextlib.suppress(UserError):  # its functions compute what is not wanted any more
                stop(again, now=True)
            again = ""
        if todo.any():
            self._begin(found)
            computing = Computing(
                self.function,
                self.callee,
                self.table,
                self.options,
                executor=self._executor,
                objects=self._objects,
                takes_bytes=self._file is None,
                result=result,
                counts=(found.items - int(todo.sum()), found.items),
                on_failure=self._on_failure,
                on_note=self._on_note,
                program=self._program,
            )
            computing.run(open_items(self.source, self.callee, todo), again=again)
        return self._conclude(result, found, mark)

    def _recorded_estimate(self, found: Scan) -> Estimate:
        """Of the results that there are.

        Raises:
            JobError: none of them has a number to be estimated.
        """
        assert self.options.stop_when is not None
        why = ""
        estimate = Estimate(self.options.stop_when, part=self.options.estimate)
        rows, failed = self._known().find(found.ids)
        wanted = rows[(rows >= 0) & ~failed & found.is_first]
        of_part = rows_of_part(self.table)
        for at in range(0, len(wanted), of_part):
            for text in self.table.take(wanted[at : at + of_part], ("result",)).column(0).to_pylist():
                if text is not None:
                    why = estimate.add(text) or why
        if why and not estimate.count:
            raise JobError(f"the results that are recorded have no estimate: {why}", remedy="mend --estimate")
        return estimate

    def _rows(self) -> NDArray[np.int64]:
        """Number of the row of each item."""
        return self._known().find(scan(self.source).ids)[0]

    def _known(self) -> Known:
        number = self.table.state.number
        if self._known_at is None or self._known_at[0] != number:
            self._known_at = number, self.table.known(code=None if self.options.ignore_code_changes else self.callee.version)
        return self._known_at[1]

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
        return (out := self._out_state()) is None or (bool(whole.out) and whole.out == out)

    # -- what is written beside the table, of maps that write other things in other ways ---------------------------

    def _begin(self, found: Scan) -> None:
        """Before functions are started: what they write may need a place."""

    def _out_state(self) -> str | None:
        """State of what was written, which is another one when that has changed; empty: it is not there. None: nothing is written."""
        return None if self._file is None else _state_of(self._file.path)

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

    def _forget(self, result: MapResult) -> None:
        """Drops rows of which another row of the same key counts: that of this call, or for keys that it has not the last one."""
        rows = self._rows()
        if result.stopped or (rows < 0).any():
            self._on_note("nothing is forgotten: not all items have results")
            return
        digests = [hashlib.blake2b(key.encode(), digest_size=ID_BYTES - 1).digest() + b"." for key in self._column("key")]
        keys = np.array(digests, f"S{ID_BYTES}")
        kept, order = np.zeros(len(keys), bool), np.argsort(keys, kind="stable")
        last = np.ones(len(keys), bool)
        last[:-1] = keys[order][1:] != keys[order][:-1]
        counted = np.unique(rows)
        kept[order[last]] = True
        kept[np.isin(keys, keys[counted])] = False
        kept[counted] = True
        whole = () if self._whole_now is None else (self._whole_now,)
        unused = self._objects_beside()
        try:
            nbytes = 0 if kept.all() else self.table.forget(kept, whole=whole)
        except TableTaken:
            self._on_note(f"nothing is forgotten: another client works on {self.table.shown}")
            return
        result.forgotten = int((~kept).sum())
        objects = self._delete_unused(unused)
        more = f" and {human_count(objects, 'object')}" if objects else ""
        self._on_note(
            f"{human_count(result.forgotten, 'superseded row', grouped=True)}{more} forgotten, {human_bytes(nbytes)} less in {self.table.shown}"
        )
        self._known_at, result._rows = None, self._rows()

    def _column(self, name: str) -> list[str]:
        return [text for part in self.table.scan((name,)) for text in part.column(0).to_pylist()]

    def _objects_beside(self) -> frozenset[str]:
        """Names of the objects beside the table that rows may name."""
        return frozenset()

    def _delete_unused(self, there: frozenset[str]) -> int:
        """Deletes those of these objects that no row names; returns how many."""
        return 0

    # -- other clients -----------------------------------------------------------------------------------------

    def _other_client(self) -> str:
        """Waits while another client works on the table; returns a run of this machine that was stopped, or whose client was killed."""
        is_told = False
        while True:
            client = self.table.state.client
            if not client.run or is_going_on():
                return ""
            folder = RunFolder(folders.runs_folder() / client.run)
            if client.host == socket.gethostname():
                if not is_driven(folder):
                    header, ended = read_header(folder), read_summary(folder)
                    can_go_on = header is not None and survives(header) and (ended is None or ended.status == "stopped")
                    return client.run if can_go_on else ""
            elif time.time() - client.seen_at > SILENT_S:
                return ""
            if not is_told:
                is_told = True
                self._on_note(f"{client.run} on {client.host} works on it: this call waits for it, and goes on if it ends early")
            time.sleep(_LOOK_S)
            self.table.refresh()

    # -- the end -----------------------------------------------------------------------------------------------

    def _conclude(self, result: MapResult, found: Scan, mark: str) -> MapResult:
        client = self.table.state.client
        if self.table.unflushed[0] or client.run:
            self.table.flush(client=client if result.cause == "stop" else Client())  # a run that was stopped can be gone on with
        rows, failed = self._known().find(found.ids)
        result._rows = rows
        result.failed, result.missing = int((failed & (rows >= 0)).sum()), int((rows < 0).sum())
        try:
            self._write(result, rows)
        except JobError as e:
            result.stopped, result.cause, mark = f"{e}; the results are recorded in {self.table.shown}", "other", ""
        if mark and not result.missing:
            others = [one for one in self.table.state.whole if (one.source, one.code) != (mark, self.callee.version)]
            out = "" if result.refused else self._out_state() or ""
            one = Whole(source=mark, code=self.callee.version, items=result.items, failed=result.failed, out=out)
            self.table.flush(whole=(*others, one)[-_MOST_WHOLE:])
            self._whole_now = one
        return result

    def _write(self, result: MapResult, rows: NDArray[np.int64]) -> None:
        """Writes the results in the order of the items; null where there is none."""
        if self._file is None:
            return
        with self._file.opened():
            of_part = rows_of_part(self.table)
            for at in range(0, len(rows), of_part):
                part = rows[at : at + of_part]
                there = np.flatnonzero(part >= 0)
                texts: list[str | None] = [None] * len(part)
                for place, text in zip(there, self.table.take(part[there], ("result",)).column(0).to_pylist(), strict=True):
                    texts[place] = text
                for n, why in self._file.write_texts(texts):
                    result.refused += 1
                    self._on_failure(Failure(at + n + 1, "", why))


def _state_of(path: Path) -> str:
    try:
        state = path.stat()
    except OSError:
        return ""
    return f"{state.st_size}-{state.st_mtime_ns}"


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
    forget_superseded: bool = False,
    only: Sequence[str] = (),
    max_failures: int | str | None = None,
    backup: bool = False,
    max_per_second: float | None = None,
    max_concurrent: int | None = None,
    seed: int = 0,
    stop_when: Enough | None = None,
    estimate: str | None = None,
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
        forget_superseded: when all items have results, rows that these supersede are deleted: of other versions of the function, and of values that
            items had before.
        only: keys of the items that are computed.
        max_failures: number, or share such as `"5%"`, of failed items above which it ends.
        backup: the slowest tasks at the end get a copy, which is paid for, too.
        max_per_second: calls begun in a second by all functions together, at most.
        max_concurrent: functions at once, at most.
        seed: of `rng`.
        stop_when: for simulation studies: no further item is begun when the confidence interval (95 %) of the mean of the results is as narrow, a number or
            a share of the mean such as `"1%"`; or when a function of the running `Estimate` (`count`, `mean`, `width`) says so.
        estimate: part of the results, if they are dicts, whose mean that is.
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
        forget_superseded=forget_superseded,
        only=only,
        max_failures=max_failures,
        backup=backup,
        max_per_second=max_per_second,
        max_concurrent=max_concurrent,
        seed=seed,
        stop_when=stop_when,
        estimate=estimate,
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
    program: Program | None = None,
) -> DurableMapJob:
    """A map that has not begun; see `map_items`.

    Args:
        executor: options of `FunctionExecutor`.
        callee: of a command that is given again, where its function may not be.
        program: command that another client can give again.
    """
    o, executor = options, checked_executor(options, {"name": "map", **executor})
    required = version_of(executor.get("requirements"))
    executor = with_environment(function, executor, on_note)
    if callee is None:
        callee = inspect_callee(
            function,
            code=executor.get("code", ()),
            selection=Selection(include=tuple(executor.get("code_include", ())), exclude=tuple(executor.get("code_exclude", ()))),
            version=o.code_version,
            seed=o.seed,
            requirements=required,
            platform=executor.get("platform") or "local",
        )
    source = open_source(items, ItemColumns(key=o.key, cost=o.cost_column, needed=callee.needed), each_file=o.each_file)
    own = home() / "maps" / f"{callee.name.replace(':', '.')}-{_digest(callee.name, source.name, str(o.key))}"
    return DurableMapJob(
        function,
        callee,
        source,
        out=None if out is None else str(out),
        place=_place_of(None if out is None else str(out), o, callee, executor, str(own)),
        options=o,
        executor=executor,
        on_failure=on_failure,
        on_note=on_note,
        program=program,
    )


def _place_of(out: str | None, options: MapOptions, callee: Callee, executor: Mapping[str, Any], own: str) -> str:
    """Address of the table of results: as the user says; of a file whose items are computed on a cloud, in the store that functions reach too, so that
    they can drive the map; else beside the destination."""
    if options.results is not None:
        return table_place(f"{located(options.results).rstrip('/')}/", "")
    channel = str(executor.get("channel") or "folder")
    is_shared = channel.partition("://")[0] in ("s3", "gs", "az")
    if out is not None and executor.get("platform") in CLOUDS and is_shared and not is_template(out) and not is_folder(out):
        return f"{channel.rstrip('/')}/maps/{quote(callee.name.replace(':', '.'), safe='')}-{quote(Path(out).name, safe='')}"
    return table_place(out, own)


def checked_executor(o: MapOptions, executor: Mapping[str, Any]) -> dict[str, Any]:
    """Options of the executor of a map.

    Args:
        o: of the map.
        executor: as they were given.

    Raises:
        JobError: one is refused, or not known.
    """
    options = dict(executor)
    if "until_width" in options:
        raise JobError("no option 'until_width'", remedy="it is stop_when")
    if o.max_per_second is not None and not 0 < o.max_per_second < float("inf"):
        raise JobError(f"max_per_second = {o.max_per_second} is not above 0")
    if o.max_concurrent is not None:
        if o.max_concurrent < 1:
            raise JobError(f"max_concurrent = {o.max_concurrent} is below 1")
        options["max_workers"] = min(o.max_concurrent, options.get("max_workers") or o.max_concurrent)
    known = set(inspect.signature(FunctionExecutor.__init__).parameters) - {"self", "durable"}
    for option in options:
        if option not in known:
            raise JobError(f"no option {option!r}", remedy=near(option, known, what="options"))
    return options


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode("utf-8", "backslashreplace"), digest_size=6).hexdigest()
