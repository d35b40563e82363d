"""`ephemeron map-partitions`: a function with each partition of a table."""

from __future__ import annotations

import csv
import json
import time
from typing import Any

import click

from ephemeron.cli.bounds import bounded, code_options
from ephemeron.cli.groups import frame_option, map_options, note, program, show
from ephemeron.cli.map import ToldFailures, end_map, executor_options, keep_for_functions, pool_options, recording_options
from ephemeron.cli.predictions import dry_run_option
from ephemeron.cli.runs.commands import detachable
from ephemeron.config.typed import Count


@click.command("map-partitions", short_help="Call a Python function for each partition of Parquet files.")
@click.argument("function", metavar="MODULE:FUNCTION")
@click.option(
    "--data",
    required=True,
    metavar="SOURCE",
    help="Table: a file, a folder, a wildcard or a URL of .parquet, such as s3://bucket/days/ or 'days/*.parquet'.",
)
@click.option("--out", required=True, metavar="FOLDER", help="Folder or s3://bucket/prefix of its own: a Parquet file per partition.")
@click.option("--columns", multiple=True, metavar="COLUMN,…", help="Columns that are read (repeatable).  [default: all]")
@click.option(
    "--partition-mb",
    type=int,
    default=64,
    show_default=True,
    callback=bounded(Count),
    help="Size of a partition in memory, about: row groups of a file are put together up to it, and larger ones are divided.",
)
@frame_option
@click.option("--callee", hidden=True)
@recording_options
@code_options
@pool_options
@dry_run_option
@detachable
def map_partitions_command(
    function: str,
    data: str,
    out: str,
    columns: tuple[str, ...],
    partition_mb: int,
    frame: str | None,
    callee: str | None,
    dry_run: bool,
    as_json: bool,
    deadline_s: float | None,
    **flags: Any,
) -> None:
    """Call MODULE:FUNCTION with each partition of a table of Parquet files, on functions, and write the rows it returns as a table of Parquet files.

    \b
    ephemeron map-partitions clean:rows --data 'days/*.parquet' --out cleaned
    ephemeron map-partitions embed:texts --data s3://bucket/texts/ --columns id,text --as polars --out s3://bucket/vectors --platform aws --channel s3://bucket/tmp

    A partition is rows of one file. MODULE:FUNCTION is given them as a frame, and `key` and `rng`, if it has these arguments, and returns a frame with any
    number of rows: of pandas or Polars, an Arrow table, or a dict of arrays. FOLDER is one table for pandas, Polars, Dask and PyArrow; all partitions have
    the columns and types of the first result, and one that has others is an error. The table of results is beside it, FOLDER.results.

    Given again, by you or others, after any end, the command computes partitions without a result, those that have changed and, if MODULE:FUNCTION has, all
    of them; files of results that do not count any more are deleted. A partition that failed is recorded with its error, and is computed again with
    --retry-failed. Its key is the file and its rows, such as day-01.parquet:0-250000.

    With --dry-run some of the partitions are computed here, in a process with a function's memory, and none on functions.

    Exit codes: 0 all partitions have results, 1 some have none, 2 refused before anything was started, 130 interrupted.
    """
    from ephemeron.config.typed import build
    from ephemeron.maps.frame_functions import FrameCallee
    from ephemeron.maps.partitions.mapping import open_map_partitions

    began, told = time.monotonic(), ToldFailures("partition", by_key=True)
    job = open_map_partitions(
        function,
        data,
        out=out,
        columns=[name for text in columns for name in next(csv.reader([text], skipinitialspace=True), [])] or None,
        frame=frame,
        partition_mb=partition_mb,
        options=map_options(flags),
        executor=executor_options(flags),
        on_failure=told.failure,
        on_note=note,
        callee=None if callee is None else build(FrameCallee, json.loads(callee), where="--callee"),
        program=program(),
    )
    if dry_run:
        return show(job, flags, deadline_s, as_json=as_json, items="partitions")
    if deadline_s is not None and callee is None:
        job.plan(deadline_s)
    keep_for_functions(job, flags, callee=job.frame_callee)
    result = job.run()
    told.end()
    end_map(result, out, began, as_json=as_json, item="partition", made="rows")
