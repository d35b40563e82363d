"""`map_partitions`: a function with each partition of a table, whose rows are written once as partitions of another table."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ephemeron.config.paths import located
from ephemeron.data.tables.arrow import pyarrow
from ephemeron.errors import DamagedObject, JobError, UserError
from ephemeron.executor.environment import version_of, with_environment
from ephemeron.executor.programs import Program
from ephemeron.executor.shipping import Adapted
from ephemeron.maps.computing import MapOptions
from ephemeron.maps.durable import DurableMapJob, checked_executor
from ephemeron.maps.frame_functions import MEMORY_MB, MEMORY_TIMES, FrameCallee, checked_place, inspect_frame_function, split_options
from ephemeron.maps.map_result import Failure, MapResult
from ephemeron.maps.objects import Objects
from ephemeron.maps.outputs import table_place
from ephemeron.maps.partitions.calls import PartitionCall, call_partition
from ephemeron.maps.partitions.folder import PartitionFiles
from ephemeron.maps.partitions.rows import as_parquet, conformed
from ephemeron.maps.partitions.source import PARTITION_MB, Partitions, PartitionSource, is_below, partition_of
from ephemeron.maps.result_table import Known, Row
from ephemeron.maps.sources import Scan
from ephemeron.runs.predictions import Prediction
from ephemeron.units import human_bytes, human_count

EXTRA = "maps"


class PartitionJob(DurableMapJob):
    """One call of `map_partitions`.

    Args:
        source: of the partitions.
        files: that are written.
        frame_callee: of the function.
        shown: name of their folder, for messages.
        args, about: see `DurableMapJob`.
    """

    source: PartitionSource

    def __init__(self, *args: Any, files: PartitionFiles, frame_callee: FrameCallee, shown: str, **about: Any) -> None:
        super().__init__(*args, **about)
        self.frame_callee = frame_callee
        self._objects = files  # type: ignore[assignment]
        self._files = files
        files.check(shown, has_table=bool(self.table.state.function))
        files.check_source(shown, self.source.names(), self.source.name)

    def predict(self, *, deadline_s: float | None = None) -> Prediction | None:
        call, self.source.call = (
            self.source.call,
            self.source.call._replace(out=""),
        )  # the partitions that are tried here are written nowhere
        try:
            return super().predict(deadline_s=deadline_s)
        finally:
            self.source.call = call

    def _known(self) -> Known:
        """Rows whose files are there, and whole."""
        number = self.table.state.number
        if self._known_at is None or self._known_at[0] != number:
            known, there = super()._known(), self._files.sizes()
            kept = known.failed | np.array([about is None or self._files.has(about, there) for about in self._abouts(known.rows)], bool)
            self._known_at = number, Known(known.ids[kept], known.rows[kept], known.failed[kept])
        return self._known_at[1]

    def _names(self, rows: NDArray[np.int64]) -> list[str | None]:
        """Name of the file of each row; None: it has none."""
        return [None if about is None else about["file"] for about in self._abouts(rows)]

    def _abouts(self, rows: NDArray[np.int64]) -> list[dict[str, Any] | None]:
        """Result of each row; None: it has none."""
        texts = self.table.take(rows, ("result",)).column(0).to_pylist()
        return [None if text is None else json.loads(text) for text in texts]

    def _counted(self, found: Scan, *, missing: bool) -> set[str]:
        """Files that count: of results; and, where functions compute what is missing, of those that they may have written."""
        rows, _ = self._known().find(found.ids)
        names = {name for name in self._names(rows[rows >= 0]) if name is not None}
        if missing:
            names |= {name for name, row in zip(self.source.names(), rows.tolist(), strict=True) if row < 0}
        if self.options.only:  # the files of other partitions stay as they are
            wanted = {partition_of(name) for name, is_one in zip(self.source.names(), self._chosen(found), strict=True) if is_one}
            names |= {name for name in self._files.sizes() if partition_of(name) not in wanted}
        return names

    def _begin(self, found: Scan) -> None:
        if gone := self._files.keep(self._counted(found, missing=True)):
            self._on_note(f"{human_count(gone, 'file')} of results that do not count any more {'is' if gone == 1 else 'are'} deleted")
        rows, _ = self._known().find(found.ids)
        self._take_schemas(rows[rows >= 0])

    def _take_schemas(self, rows: NDArray[np.int64]) -> list[bytes | None]:
        """Schema of each result, serialised; None: it has no columns."""
        found: list[bytes | None] = self.table.take(rows, ("data",)).column(0).to_pylist()
        for data in dict.fromkeys(found):
            if data is not None:
                self._files.take(data)
        return found

    def _out_state(self) -> str | None:
        return self._files.state()

    def _write(self, result: MapResult, rows: NDArray[np.int64]) -> None:
        found = Scan(np.concatenate([block.ids for block in self.source.blocks()]), np.empty(0, bool), True)
        self._settle(rows)
        self._files.keep(self._counted(found, missing=bool(result.missing)))
        result._rows, result._find = None, self._rows

    def _settle(self, rows: NDArray[np.int64]) -> None:
        """Gives columns that are null alone in a partition the type that they have in others, and all files one order of columns."""
        pa = pyarrow()
        from pyarrow import parquet

        there = rows[rows >= 0]
        datas = self._take_schemas(there)
        schema = self._files.schema
        if schema is None:
            return
        whole = schema.serialize().to_pybytes()
        others = [int(row) for row, data in zip(there, datas, strict=True) if data is not None and data != whole]
        for row in others:
            [known] = self.table.take([row], Row._fields).to_pylist()
            about = json.loads(known["result"])
            content = self._files.objects.fetch(about["file"])
            try:
                data = as_parquet(conformed(parquet.read_table(io.BytesIO(content or b"")), schema))
            except (pa.ArrowException, UserError) as e:
                raise DamagedObject(
                    f"{about['file']} cannot be read: {e}; delete it, and give the command again", key=about["file"]
                ) from None
            self._files.objects.put(about["file"], data)
            text = json.dumps({**about, "nbytes": len(data)})
            self.table.add(Row(**{**known, "result": text, "data": whole, "recorded_at": known["recorded_at"].timestamp()}))
        if others:
            self.table.flush()


def open_map_partitions(
    function: Callable[..., Any] | str,
    data: str | Path,
    *,
    out: str | Path,
    columns: str | Sequence[str] | None = None,
    frame: str | None = None,
    partition_mb: int = PARTITION_MB,
    options: MapOptions,
    executor: Mapping[str, Any],
    on_failure: Callable[[Failure], None] = lambda failure: None,
    on_note: Callable[[str], None] = lambda text: None,
    callee: FrameCallee | None = None,
    program: Program | None = None,
) -> PartitionJob:
    """A map of partitions that has not begun, but that the metadata of the files is read; see `map_partitions`.

    Args:
        executor: options of `FunctionExecutor`.
        callee: of a command that is given again, where its function may not be.
        program: command that another client can give again.
    """
    pyarrow(EXTRA)
    executor = checked_executor(options, {"name": "map-partitions", **executor})
    if not isinstance(data, str | Path):
        raise JobError(f"data is a {type(data).__name__}", remedy="give the path, the wildcard or the URL of Parquet files")
    place = _checked_out(str(out), str(data))
    objects = Objects(place if "://" in place else Path(place).as_uri())
    required = version_of(executor.get("requirements"))
    executor = with_environment(function, executor, on_note)
    if callee is None:
        callee = inspect_frame_function(
            function, frame=frame, taken=("partition",), options=options, executor=executor, requirements=required
        )
    partitions = Partitions(str(data), columns=[columns] if isinstance(columns, str) else columns, partition_mb=partition_mb)
    if inside := next((path for path in partitions.paths if is_below(path, place)), None):
        raise JobError(f"{inside} is a file of --out {out}, and is read", remedy="name another --out")
    checked_place(place, callee.frame, executor, what="write their rows there", option="--out")
    memory_mb = checked_place(partitions.paths[0], callee.frame, executor, what="read the partitions", option="--data")
    _check_memory(partitions, executor.get("memory_mb") or memory_mb)
    call = PartitionCall(
        tuple(partitions.schema.names), partitions.nulls, callee.frame, callee.has_key, objects.place("").rstrip("/"), callee.callee.version
    )
    return PartitionJob(
        Adapted(function, call_partition),
        callee.callee,
        PartitionSource(partitions, call),
        out=None,
        place=table_place(f"{place}.results/", ""),
        options=options,
        executor=executor,
        on_failure=on_failure,
        on_note=on_note,
        program=program,
        files=PartitionFiles(objects),
        frame_callee=callee,
        shown=f"--out {out}",
    )


def _checked_out(out: str, data: str) -> str:
    """Path or URL of the folder, without a slash at its end."""
    place, _ = located(out).rstrip("/"), located(data)
    if "://" not in place and Path(place).exists() and not Path(place).is_dir():
        raise JobError(f"--out {out} is a file", remedy="name a folder: a file per partition is written there")
    if "{" in out:
        raise JobError(f"--out {out} has a brace", remedy="name a folder, or s3://bucket/prefix")
    if ("://" in data or Path(data).is_dir()) and is_below(place, data):
        raise JobError(
            f"--out {out} is in the folder that is read, {data}", remedy="name another --out: what is written there would be read, too"
        )
    return place


def _check_memory(partitions: Partitions, memory_mb: int) -> None:
    """Refuses partitions that a function has no memory for.

    Raises:
        JobError: names the largest one.
    """
    sizes = [partitions.get(number)[1].nbytes for number in range(len(partitions.ranges))]
    n = int(np.argmax(sizes))
    needed = sizes[n] * MEMORY_TIMES / 2**20 + MEMORY_MB
    if memory_mb and needed > memory_mb:
        raise JobError(
            f"partition {partitions.key(n)} of {human_bytes(sizes[n])} needs about {needed:,.0f} MB, {MEMORY_TIMES} times that and {MEMORY_MB} MB, "
            f"of the {memory_mb:,} MB of a function",
            remedy=f"use --memory-mb {int(needed) // 64 * 64 + 64}, a smaller --partition-mb, or fewer --columns",
        )


def map_partitions(
    function: Callable[..., Any] | str,
    data: str | Path,
    *,
    out: str | Path,
    columns: str | Sequence[str] | None = None,
    frame: str | None = None,
    partition_mb: int = PARTITION_MB,
    deadline_s: float | None = None,
    on_failure: Callable[[Failure], None] = lambda failure: None,
    on_note: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> MapResult:
    """Calls a function with each partition of a table of Parquet files, on functions, and writes the rows it returns as a table of Parquet files. Each partition is
    computed once: given again, only those that are new or have changed are.

    Args:
        function: `function(partition)`, a function or the name of one, `module:function`. It is given rows of one file, and `key`, the file and its rows
            such as `day-01.parquet:0-250000`, and `rng`, a `numpy.random.Generator` of the seed and the partition, if it has these arguments. It returns
            rows, of any number: a pandas or Polars frame, an Arrow table, or a dict of arrays. A named index of pandas is a column.
        data: path, folder, wildcard or URL of Parquet files.
        out: folder or `s3://bucket/prefix` of its own: a file per partition. The table of results is beside it, `OUT.results`.
        columns: those that are read. None: all.
        frame: `pandas`, `polars`, `arrow` or `numpy` (a dict of arrays). None: as the annotation of the first argument says, else pandas.
        partition_mb: size of a partition in memory, about: row groups of a file are put together up to it, and larger ones are divided.
        deadline_s: see `map_items`.
        on_failure, on_note: called with each partition that fails, and with lines for the user.
        options: `only`, `retry_failed`, `forget_superseded`, `code_version`, `ignore_code_changes`, `max_failures`, `backup`, `max_per_second`,
            `max_concurrent` and `seed` of `map_items`, and those of `FunctionExecutor`.

    Returns:
        How it has ended; a result is `{"rows": 17, "file": NAME, "nbytes": 1234}`.

    Raises:
        JobError: the function, a file, a column or an option is refused, or a partition is larger than a function; nothing was paid for.
        PlanInfeasible: no functions meet the deadline.
        MissingExtra: PyArrow is not installed.
        EphemeronError: a store does not answer.
    """
    own, executor = split_options(options)
    job = open_map_partitions(
        function,
        data,
        out=out,
        columns=columns,
        frame=frame,
        partition_mb=partition_mb,
        options=own,
        executor=executor,
        on_failure=on_failure,
        on_note=on_note,
    )
    if deadline_s is not None:
        job.plan(deadline_s)
    return job.run()
