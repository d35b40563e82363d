"""`ephemeron fit-groups` and `ephemeron predict-groups`: one model per group of a table."""

from __future__ import annotations

import contextlib
import csv
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from ephemeron.cli.bounds import code_options
from ephemeron.cli.map import ToldFailures, end_map, executor_options, keep_for_functions, pool_options, recording_options
from ephemeron.cli.predictions import dry_run_option, show_prediction
from ephemeron.cli.runs.commands import ARGUMENTS, detachable
from ephemeron.errors import JobError, UserError

if TYPE_CHECKING:
    from ephemeron.executor.programs import Program
    from ephemeron.maps.computing import MapOptions
    from ephemeron.maps.durable import DurableMapJob

frame_option = click.option(
    "--as",
    "frame",
    metavar="KIND",
    help="What the function is given rows as: pandas, polars, arrow, or numpy, a dict of arrays.  [default: as its annotation says, else pandas]",
)


@click.command("fit-groups", short_help="Fit a model per group of a table; record each once.")
@click.argument("data")
@click.option(
    "--by", required=True, multiple=True, metavar="COLUMN,…", help="Columns whose values name a group (repeatable); null is a value."
)
@click.option("--fit", "function", required=True, metavar="MODULE:FUNCTION", help="Function that is given a group and returns a model.")
@click.option("--out", required=True, metavar="FOLDER", help="Folder or s3://bucket/prefix of the models.")
@frame_option
@click.option("--stream", is_flag=True, help="The function takes an iterator over parts of a group: groups may be larger than a function.")
@click.option("--callee", hidden=True)
@click.option("--grouping", default="", hidden=True)
@recording_options
@code_options
@pool_options
@dry_run_option
@detachable
def fit_groups_command(
    data: str,
    by: tuple[str, ...],
    function: str,
    out: str,
    frame: str | None,
    stream: bool,
    callee: str | None,
    grouping: str,
    dry_run: bool,
    as_json: bool,
    deadline_s: float | None,
    **flags: Any,
) -> None:
    """Fit one model per group of DATA, on functions, and record each once.

    \b
    ephemeron fit-groups sales.parquet --by store,sku --fit models:fit --out models
    ephemeron fit-groups 's3://bucket/sales/*.parquet' --by store --fit models:fit --out s3://bucket/models --platform aws --channel s3://bucket/tmp

    DATA is a file, a folder, a wildcard or a URL of .parquet, .csv or .tsv. Its rows are divided into groups in one pass, which is kept in FOLDER/groups
    and used again while the data are the same. MODULE:FUNCTION is given the rows of a group without the by-columns, and `key` (a dict) and `rng`, if it
    has these arguments. It returns a model, which is anything that can be pickled, or a model and a dict of metrics.

    Given again, by you or others, after any end, the command fits groups that are new or whose rows have changed, and nothing else. A group that
    failed is recorded with its error, and is fitted again with --retry-failed. The key of a group is its values as JSON, such as '["Berlin",17]'.

    With --dry-run the rows are divided, some of the groups are fitted here, in a process with a function's memory, and none on functions.

    Exit codes: 0 all groups have models, 1 some have none, 2 refused before anything was started, 130 interrupted.
    """
    from ephemeron.config.typed import build
    from ephemeron.maps.groups.fitting import GroupCallee, open_fit_groups

    began, told = time.monotonic(), ToldFailures("group", by_key=True)
    job = open_fit_groups(
        function,
        data,
        by=_names(by),
        out=out,
        frame=frame,
        stream=stream,
        options=map_options(flags),
        executor=executor_options(flags),
        on_failure=told.failure,
        on_note=note,
        callee=None if callee is None else build(GroupCallee, json.loads(callee), where="--callee"),
        grouping=grouping,
        program=program(),
    )
    if dry_run:
        return show(job, flags, deadline_s, as_json=as_json)
    if deadline_s is not None and callee is None:
        job.plan(deadline_s)
    keep_for_functions(job, flags, callee=job.group_callee, more=[f"--grouping={job.source.grouping.manifest.name}"])
    result = job.run()
    told.end()
    end_map(result, out, began, as_json=as_json, item="group", made="models")


@click.command("predict-groups", short_help="Apply the model of each group to its rows.")
@click.argument("models")
@click.option(
    "--data", required=True, metavar="SOURCE", help="Table with the by-columns of the models: a file, a folder, a wildcard or a URL."
)
@click.option(
    "--out",
    required=True,
    metavar="FILE",
    help=".parquet, .csv or .tsv: all rows of SOURCE in their order, with columns of predictions. The table of results is beside it.",
)
@click.option(
    "--predict",
    "function",
    metavar="MODULE:FUNCTION",
    help="Function that is given a model and a group.  [default: model.predict(group), without the by-columns]",
)
@click.option(
    "--results",
    metavar="FOLDER",
    help="Folder or URL of the table of results, which functions of a cloud have to reach.  [default: FILE.results]",
)
@frame_option
@click.option("--callee", hidden=True)
@click.option("--grouping", default="", hidden=True)
@recording_options
@code_options
@pool_options
@dry_run_option
@detachable
def predict_groups_command(
    models: str,
    data: str,
    out: str,
    function: str | None,
    frame: str | None,
    callee: str | None,
    grouping: str,
    dry_run: bool,
    as_json: bool,
    deadline_s: float | None,
    **flags: Any,
) -> None:
    """Apply the model of each group to its rows of a table, on functions, and write the rows with their predictions.

    \b
    ephemeron predict-groups models --data new.parquet --out predicted.parquet
    ephemeron predict-groups models --data new.csv --out predicted.csv --predict models:forecast

    MODELS is the folder or URL of `ephemeron fit-groups`. Models are pickles, and a pickle executes what it says: name only a folder that you trust.
    An array of predictions becomes the column `prediction`; a frame or a dict of arrays its own columns. Rows of groups without a model have null, and
    are counted.

    Given again, the command computes groups whose rows or whose model have changed, and nothing else.

    Exit codes: 0 all groups with a model have predictions, 1 some have none, 2 refused before anything was started, 130 interrupted.
    """
    from ephemeron.config.typed import build
    from ephemeron.executor.programs import launch_elsewhere
    from ephemeron.maps.groups.fitting import GroupCallee
    from ephemeron.maps.groups.predicting import open_predict_groups, told_of_unknown

    began, told, options = time.monotonic(), ToldFailures("group", by_key=True), map_options(flags)
    if launch_elsewhere(flags["platform"] or "local") is not None and "://" not in models:
        raise JobError(f"{models} is on this machine, and functions drive the run", remedy="fit the groups to s3://bucket/prefix")
    job = open_predict_groups(
        models,
        data,
        out=out,
        function=function,
        frame=frame,
        options=options,
        executor=executor_options(flags),
        on_failure=told.failure,
        on_note=note,
        callee=None if callee is None else build(GroupCallee, json.loads(callee), where="--callee"),
        grouping=grouping,
        program=program(),
    )
    with contextlib.closing(job):
        if job.unknown.rows:
            note(told_of_unknown(job.unknown))
        if dry_run:
            return show(job, flags, deadline_s, as_json=as_json)
        if deadline_s is not None and callee is None:
            job.plan(deadline_s)
        more = [f"--grouping={job.source.grouping.manifest.name}"]
        keep_for_functions(job, flags, callee=job.group_callee, more=more, source=data, option="--data", out=out, results=options.results)
        result = job.run()
    told.end()
    about = {"columns": job.columns, "rows": job.source.grouping.manifest.rows, "unknown_rows": job.unknown.rows}
    end_map(result, out, began, as_json=as_json, item="group", made="predictions", **about)


def _names(given: Sequence[str]) -> list[str]:
    """Names of columns, separated by commas; one with a comma is quoted, as in CSV."""
    found = [name for text in given for name in next(csv.reader([text], skipinitialspace=True), [])]
    if not all(found):
        raise JobError(f"--by {','.join(given)} has an empty name", remedy="write --by store,sku")
    return found


def program() -> Program:
    """This command, which any client can give again."""
    from ephemeron.executor.programs import program_here

    return program_here(click.get_current_context().meta[ARGUMENTS])


def note(text: str) -> None:
    """Tells the user a line."""
    click.secho(text, fg="yellow", err=True)


def map_options(flags: dict[str, Any]) -> MapOptions:
    """Options of the map, which are taken out of those of the command."""
    from ephemeron.maps.computing import MapOptions

    return MapOptions(**{f.name: flags.pop(f.name) for f in fields(MapOptions) if f.name in flags})


def show(job: DurableMapJob, flags: Mapping[str, Any], deadline_s: float | None, *, as_json: bool, items: str = "groups") -> None:
    """Prints what it will take."""
    found = job.predict(deadline_s=deadline_s)
    if found is None:
        raise UserError(f"all {items} have results: nothing is left to compute")
    show_prediction(lambda: found.within(budget_usd=flags["budget_usd"], deadline_s=deadline_s), as_json=as_json)
