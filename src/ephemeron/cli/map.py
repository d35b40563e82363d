"""`ephemeron map` and `ephemeron predict`: functions over many items."""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ephemeron.cli.bounds import bounded, code_options, label_option, requirements_option
from ephemeron.cli.clouds import cloud_settings, place_options, taken
from ephemeron.cli.predictions import TABLES, dry_run_option, prepared_option, show_left_out, show_prediction
from ephemeron.cli.runs.commands import ARGUMENTS, detachable
from ephemeron.config.typed import Count, Positive, plain
from ephemeron.errors import JobError, UserError
from ephemeron.units import human_count

if TYPE_CHECKING:
    from ephemeron.executor.programs import Launch
    from ephemeron.maps.calls import Callee
    from ephemeron.maps.durable import DurableMapJob
    from ephemeron.maps.frame_functions import FrameCallee
    from ephemeron.maps.map_result import Failure, MapResult
    from ephemeron.runs.folders import RunFolder

F = TypeVar("F", bound=Callable[..., Any])

INTERRUPTED = 130
_MOST_TOLD = 20
"""Failures."""


def pool_options(command: F) -> F:
    """Options of commands with many tasks."""
    for option in reversed(
        (
            place_options(),
            click.option("--memory-mb", type=int, callback=bounded(Count), help="Quota of each function; CPU comes in proportion."),
            click.option(
                "--function-timeout-s", type=float, callback=bounded(Positive), help="Time limit of a function, which runs many tasks."
            ),
            click.option("--timeout-s", type=float, callback=bounded(Positive), help="Time limit of one try of a task."),
            click.option("--retries", type=int, default=2, show_default=True, help="Further tries of a task that failed."),
            label_option,
            click.option("--prices", "prices_file", type=click.Path(path_type=Path), help="Price file instead of the built-in prices."),
            click.option("--json", "as_json", is_flag=True, help="Print a summary as one line of JSON."),
        )
    ):
        command = option(command)
    return command


def recording_options(command: F) -> F:
    """Options of commands that record the result of each item once."""
    for option in reversed(
        (
            click.option("--retry-failed", is_flag=True, help="Compute items again that have failed before."),
            click.option("--only", multiple=True, metavar="KEY", help="Only the item of this key (repeatable)."),
            click.option(
                "--code-version",
                default="",
                metavar="TEXT",
                help="Version of the function.  [default: a digest of its module and what that imports]",
            ),
            click.option("--ignore-code-changes", is_flag=True, help="Results of other versions of the function count."),
            click.option(
                "--forget-superseded",
                is_flag=True,
                help="When all items have results, delete rows that they supersede: of other versions of the function, and of values that items had before.",
            ),
            click.option("--max-failures", metavar="N|P%", help="Number or share of failed items above which it ends."),
            click.option("--backup", is_flag=True, help="Give the slowest tasks at the end a copy, which is paid for, too."),
            click.option(
                "--max-per-second",
                type=float,
                callback=bounded(Positive),
                help="Calls that all functions together begin in a second, at most.",
            ),
            click.option("--max-concurrent", type=int, callback=bounded(Count), help="Functions at once, at most."),
            click.option(
                "--deadline-s",
                type=float,
                callback=bounded(Positive),
                help="Seconds in which it is to be done: the number and memory of functions are chosen, by calling the function with some items here.",
            ),
            click.option("--seed", type=int, default=0, show_default=True, help="Seed of the argument `rng`, if the function has it."),
            click.option(
                "--code",
                multiple=True,
                type=click.Path(path_type=Path),
                metavar="FOLDER",
                help="Folder to send along, beside that of the module (repeatable).",
            ),
            requirements_option,
        )
    ):
        command = option(command)
    return command


_FORMER = {"chunksize": "items are sent and recorded in batches by themselves", "until_width": "it is --stop-when"}


def _refused(context: click.Context, option: click.Parameter, value: str | None) -> None:
    """Options of releases before."""
    if value is not None:
        raise click.UsageError(f"{option.opts[0]} is no option any more: {_FORMER[str(option.name)]}")


@click.command("map", short_help="Call a Python function for each item; record results once.")
@click.argument("function", metavar="MODULE:FUNCTION")
@click.option(
    "--items",
    required=True,
    metavar="SOURCE",
    help="Items: JSON lines, - for standard input; rows of .csv, .tsv or .parquet, each a dict by column, of a file, a folder, a wildcard or a URL "
    "such as s3://bucket/day-*.parquet; or files, such as 's3://bucket/scans/*.tiff', each an item.",
)
@click.option(
    "--out",
    metavar="DESTINATION",
    help="File of results in the order of the items: .jsonl, or .csv, .tsv or .parquet, a row per result. FOLDER/ or s3://bucket/prefix: the table of "
    "results. FOLDER/{key}.png: an object per item. Needed but for --dry-run.",
)
@click.option("--key", metavar="COLUMN", help="Column or key of the items that names each.  [default: a digest of its value]")
@click.option("--files", "each_file", is_flag=True, help="Each file of SOURCE is an item, also where it is a table.")
@click.option("--cost-column", metavar="COLUMN", help="Column with the expected cost of an item: expensive ones begin first.")
@click.option("--results", metavar="FOLDER", help="Folder or URL of the table of results.  [default: DESTINATION.results]")
@recording_options
@click.option(
    "--stop-when",
    metavar="WIDTH|P%",
    help="End when the confidence interval (95 %) of the mean of the results is as narrow: a number, or a share of the mean.",
)
@click.option("--estimate", metavar="NAME", help="Part of the results whose mean that is.  [default: they are numbers]")
@click.option("--chunksize", hidden=True, callback=_refused, expose_value=False)
@click.option("--until-width", hidden=True, callback=_refused, expose_value=False)
@click.option("--callee", hidden=True)
@code_options
@pool_options
@dry_run_option
@detachable
def map_command(
    function: str, items: str, out: str | None, dry_run: bool, as_json: bool, callee: str | None, deadline_s: float | None, **flags: Any
) -> None:
    """Call MODULE:FUNCTION with each item, on functions, and record each result once.

    \b
    ephemeron map words:count --items books.jsonl --out counts.jsonl
    ephemeron map fit:store --items stores.csv --key store --out fits.csv
    ephemeron map thumbs:make --items 'scans/*.tiff' --out 'thumbs/{key}.png'
    ephemeron map sweep:train --items s3://bucket/grid.parquet --out s3://bucket/scores --platform aws --channel s3://bucket/prefix

    Given again, by you or others, after any end, the command computes what has no result, and nothing else: results are in a table beside
    DESTINATION, by the item's key and value and by the version of the function. A failed item is recorded with its error, and is computed again with
    --retry-failed.

    A function of one argument is given the item; one of several arguments is given the parts of the item by their names, and `rng`, if it
    has that argument, is a NumPy generator of the seed and the item alone. Values of CSV are text, as they are written; those of Parquet have their
    types.

    With --dry-run some of the items are computed here, in a process with a function's memory, and none on functions.

    The module is searched in this folder, and sent with it: sources, text, and what they name; other tables and arrays of the folder
    stay, but for --code-include. Line n of DESTINATION is the result of item n; null where its task failed, and standard error has the task's own
    traceback (in a table: a row without values). Ctrl-C ends it; what is recorded stays.

    Exit codes: 0 all items have results, 1 some have none, 2 refused before anything was started, 130 interrupted.
    """
    from ephemeron.config.typed import build
    from ephemeron.executor.programs import program_here
    from ephemeron.maps.calls import Callee
    from ephemeron.maps.computing import MapOptions
    from ephemeron.maps.durable import open_map

    began, told = time.monotonic(), ToldFailures()
    if out is None and not dry_run:
        raise click.UsageError("Missing option '--out'.")
    options = MapOptions(**{f.name: flags.pop(f.name) for f in fields(MapOptions)})
    job = open_map(
        function,
        items,
        out=out,
        options=options,
        executor=executor_options(flags),
        callee=None if callee is None else build(Callee, json.loads(callee), where="--callee"),
        on_failure=told.failure,
        on_note=lambda text: click.secho(text, fg="yellow", err=True),
        program=None if items == "-" else program_here(click.get_current_context().meta[ARGUMENTS]),
    )
    if dry_run:
        found = job.predict(deadline_s=deadline_s)
        if found is None:
            raise UserError("all items have results: nothing is left to compute")
        return show_prediction(lambda: found.within(budget_usd=flags["budget_usd"], deadline_s=deadline_s), as_json=as_json)
    assert out is not None
    if deadline_s is not None and callee is None:
        job.plan(deadline_s)
    keep_for_functions(job, flags, callee=job.callee, source=items, out=out, results=options.results)
    result = job.run()
    told.end()
    end_map(result, out, began, as_json=as_json)


def keep_for_functions(
    job: DurableMapJob,
    flags: Mapping[str, Any],
    *,
    callee: Callee | FrameCallee,
    more: Sequence[str] = (),
    source: str = "",
    option: str = "--items",
    out: str = "",
    results: str | Path | None = None,
) -> None:
    """Has a command that functions are to drive keep what they need: what is known of its function, what it reads, and where its file belongs.

    Args:
        job: of the command.
        flags: of its executor.
        callee: of the function.
        more: further arguments with which it is given again.
        source: what it reads, and is not kept elsewhere; empty: nothing.
        option: that names the source.
        out: file that it writes; empty: none beside the table of results.
        results: place of the table of results, as it was given.

    Raises:
        JobError: functions of another machine do not reach what it reads, or the place of what it writes.
    """
    from ephemeron.communication.channels import public_address
    from ephemeron.data.catalog.files import WILD
    from ephemeron.executor.programs import MOST_KEPT, check_size, launch_elsewhere, present_launch
    from ephemeron.maps.outputs import is_folder, is_template

    launch, platform = present_launch(), flags["platform"] or "local"
    if launch is None:
        return
    launch.argv = (*launch.argv, f"--callee={json.dumps(plain(callee))}", *more)
    _keep_requirements(launch, job)
    is_elsewhere, path = launch_elsewhere(platform) is not None, Path(source)
    if source == "-":
        launch.keep(source, "items.jsonl", sys.stdin.buffer.read())
    elif source and "://" not in source and path.is_file():
        name, nbytes = option.removeprefix("--"), path.stat().st_size
        if is_elsewhere:
            check_size(nbytes, f"{option} {source}", platform)
        if is_elsewhere or name == "items" or nbytes <= MOST_KEPT:
            launch.keep(source, f"{name}{path.suffix}", path.read_bytes())
    elif source and is_elsewhere and "://" not in source:
        what = "a wildcard" if any(c in source for c in WILD) else "a folder"
        raise JobError(
            f"{option} {source} is {what} of this machine, and functions drive the run", remedy="give one file, or a URL that they reach"
        )
    if not is_elsewhere or not out or "://" in out:
        return
    if is_template(out) or is_folder(out):
        raise JobError(f"--out {out} is on this machine, and functions drive the run", remedy="name a file, or a prefix of a bucket")
    if results is None and flags["channel"].partition("://")[0] not in ("s3", "gs", "az"):
        raise JobError(
            f"channel {public_address(flags['channel'])[0]} is no place for results that are kept",
            remedy="add --results s3://bucket/prefix",
        )
    launch.outputs[out] = Path(out)


def _keep_requirements(launch: Launch, job: DurableMapJob) -> None:
    """Keeps what the functions of a command need, as it is now."""
    from ephemeron.executor.programs import PROGRAM
    from ephemeron.functions.environments.requirement_files import read_requirements

    if job.requirements is None:
        return
    name, before = "requirements/requirements.txt", launch.argv
    files = read_requirements(job.requirements).files()
    launch.keep_all(str(job.requirements), name, {f"requirements/{file}": text.encode() for file, text in files.items()})
    if launch.argv == before:  # it was found
        launch.argv = (*before, f"--requirements={PROGRAM}:{name}")


class ToldFailures:
    """Failures as they are told: the first ones with their tracebacks, and how many more there are.

    Args:
        item: what an item is.
        by_key: whether items are told by their keys, and not by their numbers.
    """

    def __init__(self, item: str = "item", *, by_key: bool = False) -> None:
        self._count, self._item, self._by_key = 0, item, by_key

    def failure(self, failure: Failure) -> None:
        """Tells one."""
        self._count += 1
        if self._count > _MOST_TOLD:
            return
        click.secho(f"{self._item} {failure.key if self._by_key else failure.item}: {failure.error}", fg="red", err=True)
        if failure.traceback:
            click.echo(failure.traceback.rstrip(), err=True)

    def end(self) -> None:
        """Tells how many were left out."""
        if self._count > _MOST_TOLD:
            click.secho(
                f"{human_count(self._count - _MOST_TOLD, f'further {self._item}')} failed; all errors are in the table of results",
                fg="red",
                err=True,
            )


def end_map(result: MapResult, out: str, began: float, *, as_json: bool, item: str = "item", made: str = "results", **more: Any) -> None:
    """Prints how a map has ended, and ends the command.

    Args:
        result: of it.
        out: its destination.
        began: `time.monotonic()` at its beginning.
        as_json: whether one line of JSON is printed.
        item, made: what its items are, and their results.
        more: what the line has beside.
    """
    bill, bad = result.bill, result.failed + result.refused + (0 if result.cause == "enough" else result.missing)
    assert result.table is not None
    if result.replaced:
        click.secho(f"{human_count(result.replaced, 'number')} of the results were NaN or infinite, and are null", fg="yellow", err=True)
    have = result.items - result.failed - result.missing
    if result.stopped:
        click.secho(
            f"{result.stopped}; {have} of {human_count(result.items, item)} have {made} in {out}: the same command goes on",
            fg="yellow",
            err=True,
        )
    elif not as_json:
        paid = "no function was needed" if bill is None else str(bill)
        before = f", {result.recorded} of them recorded before" if result.recorded else ""
        count = have - result.refused
        found = f"{count} {made}" if item == "item" else f"{human_count(count, item)} with {made}"
        click.echo(f"{found} in {out}{before}; {paid}", err=True)
        if result.estimate is not None:
            click.echo(f"{result.estimate}{': enough' if result.cause == 'enough' else ', which is less precise than wanted'}", err=True)
        if result.failed and not result.failures:
            click.secho(
                f"{human_count(result.failed, item)} failed before; --retry-failed computes them again, and {result.table.shown} has the errors",
                fg="yellow",
                err=True,
            )
    if as_json:
        e = result.estimate
        document = {
            "items": result.items,
            "written": have - result.refused,
            "recorded": result.recorded,
            "computed": result.computed,
            "failed": [plain(each) for each in result.failures],
            "stopped": result.stopped,
            "out": out,
            "results": result.table.shown,
            "run_id": result.run,
            "backups": result.backups,
            "forgotten": result.forgotten,
            "estimate": None if e is None else {"mean": e.mean, "width": e.width if math.isfinite(e.width) else None, "results": e.count},
            "seconds": round(time.monotonic() - began, 3),
            "cost_usd": 0.0 if bill is None else bill.cost_usd,
            "invocations": 0 if bill is None else bill.invocations,
            "gb_seconds": 0.0 if bill is None else bill.gb_seconds,
            "prices": "" if bill is None else bill.prices,
            **more,
        }
        click.echo(json.dumps(document))
    sys.exit(INTERRUPTED if result.cause == "interrupt" else 1 if bad or result.stopped else 0)


def executor_options(flags: dict[str, Any]) -> dict[str, Any]:
    """Options of `FunctionExecutor` from those of the command."""
    given, platform, channel = taken(flags), flags["platform"] or "local", flags["channel"] or "folder"
    return {**flags, "platform": platform, "channel": channel, "settings": cloud_settings(platform, given)}


@click.command("predict", short_help="Apply the trained model of a run to many inputs.")
@click.argument("run")
@click.option(
    "--data",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Inputs: .npz (array x, or arguments of the model by name), .npy, or .jsonl with a line per sample; rows of a table: .csv, .tsv or "
    ".parquet, for a run on a prepared dataset.",
)
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Outputs: .npz (array y), .npy or .jsonl. Of a table: .csv, .tsv or .parquet, with all its rows and columns, and those of predictions.",
)
@prepared_option
@click.option("--batch-size", type=int, default=256, show_default=True, callback=bounded(Count), help="Samples of one task.")
@click.option("--best", is_flag=True, help="Weights of the best evaluation (keep_best), not those at the run's end.")
@pool_options
@detachable
def predict_command(
    run: str, data: Path, out: Path, prepared: Path | None, batch_size: int, best: bool, as_json: bool, **flags: Any
) -> None:
    """Apply the trained model of RUN to many inputs, on functions.

    \b
    ephemeron predict last --data inputs.npz --out outputs.npz
    ephemeron predict RUN --data inputs.jsonl --out outputs.jsonl --platform aws --channel s3://bucket/prefix
    ephemeron predict RUN --data customers.csv --out predicted.csv

    Rows of a table have the columns from which the run's dataset was prepared. Its pipeline, which is kept with the run, makes the features.

    RUN is a name, its beginning, `last`, or the folder of a run. The model is called in evaluation mode with a batch of inputs; a task that has
    `predict_step(model, batch)` is asked instead.
    """
    from ephemeron.executor.predict import model_files, predict
    from ephemeron.executor.prediction_files import check_out, read_inputs, write_outputs
    from ephemeron.executor.programs import launch_elsewhere
    from ephemeron.maps.outputs import check_file
    from ephemeron.training.driver.result import result_of

    began = time.monotonic()
    is_table = data.suffix in TABLES
    if prepared is not None and not is_table:
        raise UserError(f"--prepared is for rows of a table, and {data} is none")
    if is_table:
        check_file(out)
        if out.suffix not in TABLES:
            raise UserError(f"{out} is no table, and {data} is one: name a file *{', *'.join(TABLES)}")
        if not data.is_file():
            raise UserError(f"there is no file {data}")
        if out.exists() and out.samefile(data):
            raise UserError(f"{out} is the file that is read: name another --out")
        return _predict_table(run, data, out, prepared, batch_size=batch_size, best=best, as_json=as_json, flags=flags)
    check_out(out)
    inputs = read_inputs(data)
    result = result_of(_folder_of(run))
    if (launch := launch_elsewhere(flags["platform"] or "local")) is not None:
        launch.keep_all(run, "model", {f"model/{name}": content for name, content in model_files(result, best=best).items()})
        launch.argv = tuple(each for each in launch.argv if each != "--best")  # they are the weights that are kept
        launch.keep(str(data), f"inputs{data.suffix}", data.read_bytes())
        launch.outputs[str(out)] = out
    outputs, bill = predict(
        result,
        inputs,
        batch_size=batch_size,
        best=best,
        casts=data.suffix == ".jsonl",
        on_trial=lambda outputs: check_out(out, outputs),
        on_outputs=lambda outputs: write_outputs(out, outputs),
        **executor_options(flags),
    )
    samples = len(next(iter(outputs.values())))
    if as_json:
        document = {
            "run": result.folder.run_id,
            "samples": samples,
            "out": str(out),
            "seconds": round(time.monotonic() - began, 3),
            "outputs": {name: list(array.shape) for name, array in outputs.items()},
            "cost_usd": bill.cost_usd,
            "invocations": bill.invocations,
            "gb_seconds": bill.gb_seconds,
            "prices": bill.prices,
        }
        click.echo(json.dumps(document))
    else:
        click.echo(f"{samples} outputs in {out}; {bill}", err=True)


def _folder_of(run: str) -> RunFolder:
    from ephemeron.runs import folders

    is_folder = (Path(run) / folders.RUN_FILE).is_file()
    return folders.RunFolder(Path(run)) if is_folder else folders.find(run, kinds=folders.MODELS)


def _predict_table(
    run: str, data: Path, out: Path, prepared: Path | None, *, batch_size: int, best: bool, as_json: bool, flags: dict[str, Any]
) -> None:
    """`predict` of rows of a table."""
    from ephemeron.executor.programs import launch_elsewhere
    from ephemeron.preparation.predicting import dataset_files, files_of, predict_table
    from ephemeron.training.driver.result import result_of

    began = time.monotonic()
    result = result_of(_folder_of(run))
    if (launch := launch_elsewhere(flags["platform"] or "local")) is not None:
        launch.keep_all(run, "model", {f"model/{name}": content for name, content in files_of(result, best=best).items()})
        launch.argv = tuple(each for each in launch.argv if each != "--best")
        launch.keep(str(data), f"inputs{data.suffix}", data.read_bytes())
        if prepared is not None:
            launch.keep_all(str(prepared), "dataset", {f"dataset/{name}": content for name, content in dataset_files(prepared).items()})
        launch.outputs[str(out)] = out
    report, bill = predict_table(result, data, out, prepared=prepared, batch_size=batch_size, best=best, **executor_options(flags))
    show_left_out(report)
    if as_json:
        document = {
            "run": result.folder.run_id,
            "samples": report.rows,
            "out": str(out),
            "seconds": round(time.monotonic() - began, 3),
            "columns": report.columns,
            "dropped": report.dropped,
            "refused": report.refused,
            "cost_usd": bill.cost_usd,
            "invocations": bill.invocations,
            "gb_seconds": bill.gb_seconds,
            "prices": bill.prices,
        }
        click.echo(json.dumps(document))
    else:
        click.echo(f"{report.rows} rows with {', '.join(report.columns)} in {out}; {bill}", err=True)
