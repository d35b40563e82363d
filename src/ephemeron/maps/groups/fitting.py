"""`fit_groups`: a function with each group of a table, whose models are recorded once."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ephemeron.config.paths import located
from ephemeron.data.tables.arrow import pyarrow
from ephemeron.errors import JobError
from ephemeron.executor.environment import version_of, with_environment
from ephemeron.executor.programs import Program
from ephemeron.executor.shipping import Adapted
from ephemeron.maps.computing import MapOptions
from ephemeron.maps.durable import DurableMapJob, checked_executor
from ephemeron.maps.frame_functions import MEMORY_MB, MEMORY_TIMES, FrameCallee, checked_place, inspect_frame_function, split_options
from ephemeron.maps.frames import Frame
from ephemeron.maps.groups.calls import GroupCall, fit_group
from ephemeron.maps.groups.grouping import Grouping, find_grouping, group_table, remove_others
from ephemeron.maps.groups.keys import chosen
from ephemeron.maps.groups.models import MODELS, GroupFit, ModelObjects, read_fit, write_fit
from ephemeron.maps.groups.source import GroupSource
from ephemeron.maps.groups.table_data import EXTRA, open_table
from ephemeron.maps.map_result import Failure, MapResult
from ephemeron.maps.objects import Objects, check_folder
from ephemeron.maps.outputs import table_place
from ephemeron.maps.sources import Scan
from ephemeron.units import human_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCallee(FrameCallee):
    """What is known of a function of groups without importing it."""

    is_streamed: bool = False

    def call(self, grouping: Grouping) -> GroupCall:
        """How it is called with the groups."""
        about = grouping.manifest
        return GroupCall(
            about.by,
            tuple(column.name for column in about.columns),
            tuple(column.name for column in about.columns if column.has_nulls),
            self.frame,
            self.has_key,
            self.is_streamed,
        )


def inspect_group_function(
    function: Callable[..., Any] | str,
    *,
    frame: str | None,
    before: Sequence[str] = (),
    otherwise: Frame | None = None,
    stream: bool = False,
    options: MapOptions,
    executor: Mapping[str, Any],
    also: str = "",
    requirements: str = "",
) -> GroupCallee:
    """What the signature and the sources of a function of groups say.

    Args:
        function, frame, before, otherwise, options, executor, also, requirements: see `inspect_frame_function`.
        stream: whether it is given the parts of a group.

    Raises:
        JobError: there is no such function, or it takes other arguments.
    """
    found = inspect_frame_function(
        function,
        frame=frame,
        taken=(*before, "group"),
        otherwise=otherwise,
        options=options,
        executor=executor,
        also=f"{also} stream" if stream else also,
        requirements=requirements,
    )
    return GroupCallee(callee=found.callee, frame=found.frame, has_key=found.has_key, is_streamed=stream)


class GroupJob(DurableMapJob):
    """A durable map of groups. Groups that a function has no memory for are refused before it begins.

    Args:
        function: the user's, or its name.
        adapter: that calls it.
        callee: of the function.
        source: of the groups.
        memory_mb: of a function, where the options name none; 0: not known.
        place: address of the table of results.
        options: of the map.
        executor, on_failure, on_note, program: see `DurableMapJob`.
    """

    source: GroupSource

    def __init__(
        self,
        function: Callable[..., Any] | str,
        adapter: Callable[..., Any],
        callee: GroupCallee,
        source: GroupSource,
        *,
        memory_mb: int,
        place: str,
        options: MapOptions,
        executor: Mapping[str, Any],
        on_failure: Callable[[Failure], None],
        on_note: Callable[[str], None],
        program: Program | None = None,
    ) -> None:
        self.group_callee, self._usual_mb = callee, memory_mb
        keys = frozenset(source.grouping.index.column("key").to_pylist()) if options.only else frozenset()
        super().__init__(
            Adapted(function, adapter),
            callee.callee,
            source,
            out=None,
            place=place,
            options=replace(options, only=tuple(chosen(options.only, keys, columns=len(source.call.by)))),
            executor=executor,
            on_failure=on_failure,
            on_note=on_note,
            program=program,
        )

    def _todo(self, found: Scan) -> NDArray[np.bool_]:
        todo = super()._todo(found)
        memory_mb = self._executor.get("memory_mb") or self._usual_mb
        if memory_mb and not self.group_callee.is_streamed:
            check_memory(self.source, todo, memory_mb)
        return todo


def check_memory(source: GroupSource, todo: NDArray[np.bool_], memory_mb: int) -> None:
    """Refuses groups that a function has no memory for.

    Args:
        source: of the groups.
        todo: which of them are to be computed.
        memory_mb: of a function.

    Raises:
        JobError: names the largest group, and what it needs.
    """
    rows = source.order[todo]
    nbytes = source.grouping.index.column("nbytes").to_numpy()[rows]
    needed = nbytes * MEMORY_TIMES / 2**20 + MEMORY_MB
    large = int((needed > memory_mb).sum())
    if not large:
        return
    n = int(np.argmax(nbytes))
    group = source.grouping.index.slice(int(rows[n]), 1).to_pylist()[0]
    others = f"; so do {large - 1:,} others" if large > 1 else ""
    raise JobError(
        f"group {group['key']} has {group['rows']:,} rows of {human_bytes(group['nbytes'])} and needs about {needed[n]:,.0f} MB, "
        f"{MEMORY_TIMES} times that and {MEMORY_MB} MB, of the {memory_mb:,} MB of a function{others}",
        remedy=f"use --memory-mb {int(needed[n]) // 64 * 64 + 64}, more columns in --by, or --stream with a function that takes parts of a group",
    )


# -- models -------------------------------------------------------------------------------------------------------


class GroupFitJob(GroupJob):
    """One call of `fit_groups`."""

    def __init__(self, *args: Any, objects: Objects, **options: Any) -> None:
        super().__init__(*args, **options)
        self._objects = ModelObjects(objects)  # type: ignore[assignment]
        about = self.source.grouping.manifest
        self._beside = objects
        self._fit = GroupFit(
            function=self.callee.name,
            code="" if self.options.ignore_code_changes else self.callee.version,
            by=about.by,
            kinds=about.kinds,
            columns=about.columns,
            frame=self.group_callee.frame,
            grouping=about.name,
        )

    def _objects_beside(self) -> frozenset[str]:
        return frozenset(self._beside.sizes(MODELS))

    def _delete_unused(self, there: frozenset[str]) -> int:
        used = {json.loads(text).get("object") for text in self._column("result") if text}
        unused = there - used
        number = self.table.state.number
        self.table.refresh()
        if not unused or self.table.state.number != number or self.table.has_readers():  # the next call deletes them
            return 0
        self._beside.delete(sorted(unused))
        return len(unused)

    def _run(self) -> MapResult:
        if read_fit(self._beside) is None:
            write_fit(self._beside, self._fit)  # what there will be is found, however this ends
        result = super()._run()
        if not result.missing and not result.stopped:
            write_fit(self._beside, self._fit)
            remove_others(self._beside, self.source.grouping.manifest)
        return result


def open_fit_groups(
    function: Callable[..., Any] | str,
    data: Any,
    *,
    by: Sequence[str],
    out: str | Path,
    frame: str | None = None,
    stream: bool = False,
    options: MapOptions,
    executor: Mapping[str, Any],
    on_failure: Callable[[Failure], None] = lambda failure: None,
    on_note: Callable[[str], None] = lambda text: None,
    callee: GroupCallee | None = None,
    grouping: str = "",
    program: Program | None = None,
) -> GroupFitJob:
    """A fit of groups that has not begun, but that the table is divided; see `fit_groups`.

    Args:
        executor: options of `FunctionExecutor`.
        callee: of a command that is given again, where its function may not be.
        grouping: name of the groups of such a command, where its data may not be.
        program: command that another client can give again.
    """
    pyarrow(EXTRA)
    executor = checked_executor(options, {"name": "fit-groups", **executor})
    place = table_place(f"{located(out).rstrip('/')}/", "")
    check_folder(place)
    objects = Objects(place)
    required = version_of(executor.get("requirements"))
    executor = with_environment(function, executor, on_note)
    if callee is None:
        callee = inspect_group_function(function, frame=frame, stream=stream, options=options, executor=executor, requirements=required)
    memory_mb = checked_place(objects.place(""), callee.frame, executor)
    if grouping:
        found = find_grouping(objects, grouping)
        if found is None:
            raise JobError(f"{objects.place(f'groups/{grouping}')} is gone", remedy="give the command again")
    else:
        table = open_table(data)
        try:
            found = group_table(table, [by] if isinstance(by, str) else list(by), objects, on_note=on_note)
        finally:
            table.close()
    source = GroupSource(found, callee.call(found), name="the table", fingerprint=found.manifest.name)
    return GroupFitJob(
        function,
        fit_group,
        callee,
        source,
        memory_mb=memory_mb,
        place=place,
        options=options,
        executor=executor,
        on_failure=on_failure,
        on_note=on_note,
        program=program,
        objects=objects,
    )


def fit_groups(
    fit: Callable[..., Any] | str,
    data: Any,
    *,
    by: str | Sequence[str],
    out: str | Path,
    frame: str | None = None,
    stream: bool = False,
    deadline_s: float | None = None,
    on_failure: Callable[[Failure], None] = lambda failure: None,
    on_note: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> MapResult:
    """Fits one model per group of a table, on functions, and records each once: given again, only groups that are new or have changed are fitted.

    Args:
        fit: `fit(group)`, a function or the name of one, `module:function`. It is given the rows of a group, without the by-columns, and
            `key`, their values as a dict, and `rng`, a `numpy.random.Generator` of the seed and the group, if it has these arguments. It returns
            a model, which is anything that can be pickled, or a model and a dict of metrics.
        data: path, folder, wildcard or URL of Parquet or CSV files; a pandas or Polars frame, an Arrow table, or a dict of arrays.
        by: columns whose values name a group; null is a value.
        out: folder or `s3://bucket/prefix` of the models.
        frame: `pandas`, `polars`, `arrow` or `numpy` (a dict of arrays). None: as the annotation of the first argument of `fit` says, else pandas.
        stream: whether `fit` takes an iterator over parts of a group, for groups that are larger than a function's memory.
        deadline_s: see `map_items`.
        on_failure, on_note: called with each group that fails, and with lines for the user.
        options: `only`, `retry_failed`, `forget_superseded`, `code_version`, `ignore_code_changes`, `max_failures`, `backup`, `max_per_second`,
            `max_concurrent` and `seed` of `map_items`, and those of `FunctionExecutor`.

    Returns:
        How it has ended. `ephemeron.maps.GroupModels.open(out)` has the models.

    Raises:
        JobError: the function, the table, a column or an option is refused, or a group is larger than a function; nothing was paid for.
        PlanInfeasible: no functions meet the deadline.
        MissingExtra: PyArrow is not installed.
        EphemeronError: a store does not answer.
    """
    own, executor = split_options(options)
    job = open_fit_groups(
        fit,
        data,
        by=[by] if isinstance(by, str) else by,
        out=out,
        frame=frame,
        stream=stream,
        options=own,
        executor=executor,
        on_failure=on_failure,
        on_note=on_note,
    )
    if deadline_s is not None:
        job.plan(deadline_s)
    return job.run()
