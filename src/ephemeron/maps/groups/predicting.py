"""`predict_groups`: the model of each group with its rows of another table."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ephemeron.config.paths import located
from ephemeron.config.typed import near
from ephemeron.config.user_code import resolve
from ephemeron.data.tables.table_file import TABLES
from ephemeron.errors import JobError
from ephemeron.executor.environment import version_of, with_environment
from ephemeron.executor.programs import Program
from ephemeron.maps.code_version import code_version
from ephemeron.maps.computing import MapOptions
from ephemeron.maps.durable import checked_executor
from ephemeron.maps.frame_functions import checked_place, split_options
from ephemeron.maps.frames import PREDICTION
from ephemeron.maps.groups.calls import call_predict, predict_group
from ephemeron.maps.groups.division import POSITION
from ephemeron.maps.groups.fitting import GroupCallee, GroupJob, inspect_group_function
from ephemeron.maps.groups.group_rows import read_column
from ephemeron.maps.groups.grouping import Grouping, find_grouping, group_table, remove_others
from ephemeron.maps.groups.joining import write_joined
from ephemeron.maps.groups.keys import kind_of_key
from ephemeron.maps.groups.models import GroupModels
from ephemeron.maps.groups.source import ModelledGroupSource
from ephemeron.maps.groups.table_data import TableData, open_table
from ephemeron.maps.map_result import Failure, MapResult
from ephemeron.maps.objects import Objects, check_folder
from ephemeron.maps.outputs import check_file, table_place
from ephemeron.maps.result_table import latest, reading

_DEFAULT = f"{call_predict.__module__}:{call_predict.__qualname__}"
"""By its name a function is found again as it was sent, with the code of the models, where a command is given again."""
_TAKEN = 256
"""Groups whose predictions are read at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Unknown:
    """Rows of groups that have no model."""

    rows: int
    groups: int
    key: str
    """Of the first of them; empty: there are none."""


class GroupPredictJob(GroupJob):
    """One call of `predict_groups`."""

    source: ModelledGroupSource

    def __init__(self, *args: Any, data: TableData, path: Path, unknown: Unknown, reader: contextlib.ExitStack, **options: Any) -> None:
        super().__init__(*args, **options)
        self._data, self._path, self.unknown, self._reader = data, path, unknown, reader
        self.columns: list[str] = []
        """Of the predictions, when they are written."""

    def run(self) -> MapResult:
        try:
            result = super().run()
            rows = self._rows()
            try:
                self.columns = write_joined(self._data, self.source.grouping.manifest.rows, lambda: self._predicted(rows), self._path)
            except JobError as e:
                result.stopped, result.cause = f"{e}; the predictions are recorded in {self.table.shown}", "other"
            if not result.missing and not result.stopped:
                remove_others(self.source.grouping.objects, self.source.grouping.manifest)
            return result
        finally:
            self.close()

    def close(self) -> None:
        """Ends what it has begun when it was opened; `run` does so, too."""
        self._data.close()
        self._reader.close()

    def _predicted(self, rows: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], bytes]]:
        """Numbers of the rows of each group that has predictions, and these."""
        failed = self._known().find(np.concatenate([block.ids for block in self.source.blocks()]))[1]
        there = np.flatnonzero((rows >= 0) & ~failed)
        index = self.source.grouping.index
        of_index = self.source.order[there]
        order = np.argsort(of_index, kind="stable")  # by file
        files: dict[int, NDArray[np.int64]] = {}
        for at in range(0, len(order), _TAKEN):
            part = order[at : at + _TAKEN]
            streams = self.table.take(rows[there[part]], ("data",)).column(0).to_pylist()
            groups = index.take(of_index[part]).select(["file", "first", "rows"]).to_pylist()
            for group, stream in zip(groups, streams, strict=True):
                if group["file"] not in files:
                    place = self.source.grouping.objects.place(self.source.grouping.manifest.file(group["file"]))
                    files = {group["file"]: read_column(place, POSITION).to_numpy()}
                yield files[group["file"]][group["first"] : group["first"] + group["rows"]], stream


def open_predict_groups(
    models: str | Path | GroupModels,
    data: Any,
    *,
    out: str | Path,
    function: Callable[..., Any] | str | None = None,
    frame: str | None = None,
    options: MapOptions,
    executor: Mapping[str, Any],
    on_failure: Callable[[Failure], None] = lambda failure: None,
    on_note: Callable[[str], None] = lambda text: None,
    callee: GroupCallee | None = None,
    grouping: str = "",
    program: Program | None = None,
) -> GroupPredictJob:
    """Predictions of groups that have not begun, but that the table is divided; see `predict_groups`.

    Args:
        executor: options of `FunctionExecutor`.
        callee: of a command that is given again, where its function may not be.
        grouping: name of the groups of such a command.
        program: command that another client can give again.
    """
    executor = checked_executor(options, {"name": "predict-groups", **executor})
    known = models if isinstance(models, GroupModels) else GroupModels.open(models)
    if not len(known):
        raise JobError(f"no group of {known.objects.place('')} has a model", remedy="run: ephemeron fit-groups")
    with contextlib.ExitStack() as refused:
        reader = refused.enter_context(contextlib.ExitStack())  # what the predictions read stays until they are computed
        reader.enter_context(reading(known.table.address))
        if not isinstance(models, GroupModels) and latest(known.table.address).number != known.table.state.number:
            known = GroupModels.open(models)
        job = _job(
            known,
            data,
            out=out,
            function=function,
            frame=frame,
            options=options,
            executor=executor,
            on_failure=on_failure,
            on_note=on_note,
            callee=callee,
            grouping=grouping,
            program=program,
            reader=reader,
        )
        refused.pop_all()
    return job


def _job(
    known: GroupModels,
    data: Any,
    *,
    out: str | Path,
    function: Callable[..., Any] | str | None,
    frame: str | None,
    options: MapOptions,
    executor: dict[str, Any],
    on_failure: Callable[[Failure], None],
    on_note: Callable[[str], None],
    callee: GroupCallee | None,
    grouping: str,
    program: Program | None,
    reader: contextlib.ExitStack,
) -> GroupPredictJob:
    path = _checked_out(out, data)
    executor["code"] = [*executor.get("code", ()), *_folder_of(known.fit.function)]
    function = call_predict if function is None else function
    required = version_of(executor.get("requirements"))
    executor = with_environment(known.fit.function if function is call_predict else function, executor, on_note)
    if callee is None:
        callee = inspect_group_function(
            function,
            frame=frame or (known.fit.frame if function is call_predict else None),
            before=("model",),
            otherwise=known.fit.frame,
            options=options,
            executor=executor,
            also=_code_of(known.fit.function),
            requirements=required,
        )
    place = table_place(str(path), "") if options.results is None else table_place(f"{located(options.results).rstrip('/')}/", "")
    check_folder(place)
    objects = Objects(place)
    memory_mb = checked_place(objects.place(""), callee.frame, executor, option="--results")
    table = open_table(data)
    _check_columns(table, known, is_default=function is call_predict)
    groups = _groups(table, known, objects, grouping, on_note)
    keys = groups.index.column("key").to_pylist()
    recorded = known.recorded(keys)
    if any(about is not None and "object" in about for about in recorded):
        checked_place(known.objects.place(""), callee.frame, executor)
    digests = ["" if about is None else about["digest"] for about in recorded]
    unknown = _unknown(groups.index, digests)
    if not any(digests):
        raise JobError(
            f"no group of {table.name} has a model in {known.objects.place('')}", remedy=f"it has models of such as {next(iter(known))}"
        )
    source = ModelledGroupSource(
        groups,
        callee.call(groups),
        name=table.name,
        fingerprint=f"{groups.manifest.name} {known.fingerprint()}",
        models=digests,
        fetch=lambda rows: known.sent([keys[row] for row in rows]),
    )
    return GroupPredictJob(
        _DEFAULT if function is call_predict else function,
        predict_group,
        callee,
        source,
        memory_mb=memory_mb,
        place=place,
        options=options,
        executor=executor,
        on_failure=on_failure,
        on_note=on_note,
        program=program,
        data=table,
        path=path,
        unknown=unknown,
        reader=reader,
    )


def _groups(table: TableData, models: GroupModels, objects: Objects, name: str, on_note: Callable[[str], None]) -> Grouping:
    """Groups of the rows; of a command that is given again those that it had.

    Raises:
        JobError: these are gone, or the table has changed since.
    """
    if not name:
        wanted = {column.name: column.type for column in models.fit.columns}
        return group_table(table, models.by, objects, positions=True, wanted=wanted, on_note=on_note)
    found = find_grouping(objects, name)
    if found is None:
        raise JobError(f"{objects.place(f'groups/{name}')} is gone", remedy="give the command again")
    if table.digest() != found.manifest.data:
        raise JobError(f"{table.name} has changed since the run began", remedy="give the command again")
    return found


def predict_groups(
    models: str | Path | GroupModels,
    data: Any,
    *,
    out: str | Path,
    predict: Callable[..., Any] | str | None = None,
    frame: str | None = None,
    deadline_s: float | None = None,
    on_failure: Callable[[Failure], None] = lambda failure: None,
    on_note: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> MapResult:
    """Applies the model of each group to its rows of a table, on functions, and writes the table with the predictions.

    Args:
        models: folder or URL of `fit_groups`, or these models.
        data: as for `fit_groups`, with its by-columns.
        out: `.parquet`, `.csv` or `.tsv`: all rows in their order, and columns of predictions, null in rows of groups without a model, and of
            groups that failed. The table of results is beside it.
        predict: `predict(model, group)`, which returns an array with a value per row (column `prediction`), one with several (`prediction_0`, …), or
            columns by name. None: `model.predict(group)`. The group has no by-columns.
        frame: see `fit_groups`. None: by the annotation of the second argument of `predict`, else what the models were fitted to.
        deadline_s, on_failure, on_note, options: see `fit_groups`; and `results`, folder or URL of the table of results, which functions of a
            cloud have to reach. None: beside `out`.

    Returns:
        How it has ended; an item is a group that has a model.

    Raises:
        JobError: there are no models, or the table, a column, the function or an option is refused; nothing was paid for.
        DamagedObject: what says which models there are is damaged.
        EphemeronError: a store does not answer.
    """
    own, executor = split_options(options, but=("results",))
    job = open_predict_groups(
        models, data, out=out, function=predict, frame=frame, options=own, executor=executor, on_failure=on_failure, on_note=on_note
    )
    with contextlib.closing(job):
        if job.unknown.rows:
            on_note(told_of_unknown(job.unknown))
        if deadline_s is not None:
            job.plan(deadline_s)
        return job.run()


def told_of_unknown(unknown: Unknown) -> str:
    """Rows of groups without a model, in words."""
    others = f" and {unknown.groups - 1:,} others" if unknown.groups > 1 else ""
    return f"{unknown.rows:,} rows are of groups without a model, whose predictions are null: {unknown.key}{others}"


def _unknown(index: Any, digests: Sequence[str]) -> Unknown:
    without = [n for n, digest in enumerate(digests) if not digest]
    rows = index.column("rows").to_numpy()
    return Unknown(rows=int(rows[without].sum()), groups=len(without), key=index.column("key")[without[0]].as_py() if without else "")


def _checked_out(out: str | Path, data: Any) -> Path:
    path = Path(out)
    if "://" in str(out) or path.suffix not in TABLES:
        raise JobError(f"--out {out} is no table of this machine", remedy=f"name a file *{', *'.join(TABLES)}")
    check_file(path)
    if isinstance(data, str | Path) and "://" not in str(data) and path.exists() and Path(data).exists() and path.samefile(data):
        raise JobError(f"{out} is the file that is read", remedy="name another --out")
    return Path(located(path))


def _check_columns(table: TableData, models: GroupModels, *, is_default: bool) -> None:
    for name, kind in zip(models.by, models.fit.kinds, strict=True):
        if name not in table.schema.names:
            raise JobError(f"{table.name} has no column {name!r}", remedy=near(name, table.schema.names, what="its columns"))
        found = kind_of_key(table.schema.field(name).type)
        if kind != found and "null" not in (kind, found):
            raise JobError(
                f"{table.name}: by-column {name} is of {found or table.schema.field(name).type}, and groups of the models are of {kind}",
                remedy="convert it",
            )
    if is_default and PREDICTION in table.schema.names:
        raise JobError(f"{table.name} has a column {PREDICTION!r} already, which predictions would have", remedy="rename it")


def _folder_of(function: str) -> list[Path]:
    """Folder of the module with the function that made the models, whose classes they may have, if it is in the working folder."""
    top = function.replace(":", ".").partition(".")[0]
    return [Path.cwd()] if PathFinder.find_spec(top, [str(Path.cwd())]) is not None else []


def _code_of(function: str) -> str:
    """Version of the code that classes of models may be of; empty: it is not in the working folder."""
    module, _, name = function.rpartition(":" if ":" in function else ".")
    if not module or not _folder_of(function):
        return ""
    try:
        return code_version(resolve(f"{module}:{name}", [Path.cwd()]))
    except JobError:  # its models may do without it
        return ""
