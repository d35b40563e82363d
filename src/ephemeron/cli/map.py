"""`ephemeron map` and `ephemeron predict`: functions over many items."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from ephemeron.cli.bounds import bounded, code_options, label_option
from ephemeron.cli.clouds import cloud_settings, place_options, taken
from ephemeron.cli.predictions import TABLES, dry_run_option, prepared_option, show_left_out, show_prediction
from ephemeron.cli.runs.commands import detachable
from ephemeron.config.typed import Count, Positive
from ephemeron.data.formats.lines import text_lines
from ephemeron.data.formats.records import LARGEST, CsvRows
from ephemeron.errors import BudgetReached, JobError, TaskFailed, UserError
from ephemeron.units import human_count

if TYPE_CHECKING:
    from ephemeron.executor import FunctionExecutor
    from ephemeron.executor.futures import TaskFuture
    from ephemeron.runs.folders import RunFolder

F = TypeVar("F", bound=Callable[..., Any])

INTERRUPTED = 130
RESULT = "result"
"""Column of results that are no dicts."""
_ROWS = 10_000
"""Rows of a table that are read at a time."""


def _pool_options(command: F) -> F:
    """Options of both commands."""
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


@click.command("map", short_help="Call a Python function with each item of a file.")
@click.argument("function", metavar="MODULE:FUNCTION")
@click.option(
    "--items",
    "items_file",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Items: one JSON value per line, - for standard input; or rows of a .csv, .tsv or .parquet, each a dict by column.",
)
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Results in the order of the items: one JSON value per line; or .csv, .tsv or .parquet, a row per result. Needed but for --dry-run.",
)
@click.option("--chunksize", type=int, default=1, show_default=True, callback=bounded(Count), help="Items of one task.")
@click.option(
    "--code",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="FOLDER",
    help="Folder to send along, beside that of the module (repeatable).",
)
@code_options
@_pool_options
@dry_run_option
@detachable
def map_command(function: str, items_file: Path, out: Path | None, chunksize: int, dry_run: bool, as_json: bool, **flags: Any) -> None:
    """Call MODULE:FUNCTION with each item of a file, on functions, and write the results.

    \b
    ephemeron map words:count --items books.jsonl --out counts.jsonl
    ephemeron map sweep:train --items grid.jsonl --out scores.jsonl --platform aws --channel s3://bucket/prefix
    ephemeron map fit:store --items stores.csv --out fits.csv

    A row of a table is given to the function as one dict. Values of CSV are text, as they are written; those of Parquet have their types. A row
    of an OUT that is a table has the columns of the results, which are dicts with the same keys, or `result`.

    With --dry-run some of the items are computed here, in a process with a function's memory, and none on functions.

    The module is searched in this folder, and sent with it: sources, text, and what they name; other tables and arrays of the folder
    stay, but for --code-include. Line n of OUT is the result of item n; null where its task failed,
    and standard error has the task's own traceback (in a table: a row without values). Ctrl-C cancels what is left.

    Exit codes: 0 all items have results, 1 some have none, 2 refused before anything was started, 130 interrupted.
    """
    from ephemeron.executor import FunctionExecutor
    from ephemeron.executor.programs import present_launch

    items, data, suffix = _items(items_file)
    if dry_run:
        from ephemeron.executor.map_prediction import predict_map

        with FunctionExecutor(**_executor_options(flags)) as pool:
            code = {name: flags[name] for name in ("code", "code_include", "code_exclude", "timeout_s")}
            found = predict_map(pool, function, items, chunksize=chunksize, **code)
        return show_prediction(lambda: found.within(budget_usd=flags["budget_usd"]), as_json=as_json)
    if out is None:
        raise click.UsageError("Missing option '--out'.")
    _check_out(out)
    if (launch := present_launch()) is not None:
        launch.keep(str(items_file), f"items{suffix}", data)
        launch.outputs[str(out)] = out
    began = time.monotonic()
    with FunctionExecutor(**_executor_options(flags)) as pool:
        futures = pool.map_futures(function, items, chunksize=chunksize)
        collected = _Collected(futures, out, of=len(items), chunksize=chunksize)
        collected.collect(pool)
    collected.report(pool, began, as_json=as_json)


class _Collected:
    """Results of a `map` as they are written, and how it ended."""

    def __init__(self, futures: list[TaskFuture], out: Path, *, of: int, chunksize: int) -> None:
        self.futures, self.out, self.of, self.chunksize = futures, out, of, chunksize
        self.file = _TableFile(out) if out.suffix in TABLES else _Lines(out)
        self.written = 0
        self.failures: list[dict[str, object]] = []
        self.lost = 0
        """Items without a result, of those that are written."""
        self.stopped = ""
        """Why it ended early; empty: it did not."""
        self.code = 0

    def collect(self, pool: FunctionExecutor) -> None:
        """Writes results until the last one, an interrupt, or the end of the budget."""
        try:
            with self.file.opened():
                for values in self._values():
                    self.file.write(values)
                    self.written += len(values)
            return
        except KeyboardInterrupt:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # functions are ended in good order, which takes seconds
            done = sum(f.done() for f in self.futures)
            self.stopped, self.code = (f"interrupted: {done} of {human_count(len(self.futures), 'task')} are done", INTERRUPTED)
        except BudgetReached as e:
            self.stopped, self.code = str(e), 1
        except OSError as e:
            self.stopped, self.code = f"{self.out} cannot be written: {e.strerror}", 1
        for future in self.futures:
            future.cancel()

    def _values(self) -> Iterator[list[object]]:
        for n, future in enumerate(self.futures):
            first = n * self.chunksize + 1
            try:
                found = future.result()
            except TaskFailed as e:
                yield self._none(first, min(self.chunksize, self.of - first + 1), e)
                continue
            values = found if self.chunksize > 1 else [found]
            yield [self._checked(first + k, value, future.task) for k, value in enumerate(values)]

    def _checked(self, item: int, value: object, task: str) -> object:
        """A result; None where the file cannot have it."""
        try:
            json.dumps(value)
            wrong = self.file.refusal(value)
        except (TypeError, ValueError) as e:
            wrong = f"the result is no JSON: {e}"
        return self._none(item, 1, TaskFailed(wrong, task=task))[0] if wrong else value

    def _none(self, first: int, count: int, error: TaskFailed) -> list[object]:
        """What stands for the results of items that have none, after their error was told."""
        self.lost += count
        self.failures.append({"item": first, "error": str(error), "tries": error.tries, "traceback": error.traceback})
        click.secho(f"{f'item {first}' if count == 1 else f'items {first} to {first + count - 1}'}: {error}", fg="red", err=True)
        if error.traceback:
            click.echo(error.traceback.rstrip(), err=True)
        return [None] * count

    def report(self, pool: FunctionExecutor, began: float, *, as_json: bool) -> None:
        """Prints how it ended, and ends the command."""
        bill, failed = pool.bill(), len(self.failures)
        if self.stopped:
            click.secho(f"{self.stopped}; the first {self.written} results are in {self.out}", fg="yellow", err=True)
        elif not as_json:
            click.echo(f"{self.written - self.lost} results in {self.out}; {bill}", err=True)
        if as_json:
            document = {
                "items": self.of,
                "written": self.written,
                "failed": self.failures,
                "stopped": self.stopped,
                "out": str(self.out),
                "seconds": round(time.monotonic() - began, 3),
                "cost_usd": bill.cost_usd,
                "invocations": bill.invocations,
                "gb_seconds": bill.gb_seconds,
                "prices": bill.prices,
            }
            click.echo(json.dumps(document))
        sys.exit(self.code or (1 if failed else 0))


class _Lines:
    """Results as JSON lines."""

    def __init__(self, path: Path) -> None:
        self._path = path

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Inside, results can be written."""
        with self._path.open("w") as self._file:
            yield

    def refusal(self, value: object) -> str:
        """Why a result cannot be written; empty: it can."""
        return ""

    def write(self, values: Sequence[object]) -> None:
        """Writes results; None for those that failed."""
        self._file.writelines(json.dumps(value) + "\n" for value in values)
        self._file.flush()


class _TableFile(_Lines):
    """Results as rows: of CSV, as they come; of Parquet, when all have come. Columns are those of the first result."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._columns: tuple[str, ...] | None = None
        self._kinds: dict[str, str] = {}
        self._floats, self._large = set[str](), set[str]()
        """Columns with numbers that are no integers, and with integers that float64 does not hold."""
        self._rows: list[Mapping[str, Any]] = []
        self._is_written = False

    @contextmanager
    def opened(self) -> Iterator[None]:
        if self._path.suffix != ".parquet":
            with self._path.open("w", newline="", encoding="utf-8") as self._file:
                try:
                    yield
                finally:
                    self._columns = self._columns or (RESULT,)
                    self._write_csv()
            return
        from ephemeron.data.tables.arrow import pyarrow

        pa = pyarrow()
        from pyarrow import parquet

        try:
            yield
        finally:
            names = self._columns or (RESULT,)
            parquet.write_table(pa.table({name: [row.get(name) for row in self._rows] for name in names}), self._path)

    def refusal(self, value: object) -> str:
        if value is None:
            return ""
        row = _row(value)
        if not row:
            return "the result is an empty dict, which is no row of a table"
        if isinstance(value, dict) and len(row) < len(value):
            return "the result has two keys of the same text"
        if (odd := next((text for text in (*row, *row.values()) if isinstance(text, str) and not _is_utf8(text)), None)) is not None:
            return f"{odd!r:.80} of the result has half a surrogate pair, which no table has: write *.jsonl"
        if self._columns is not None and row.keys() != set(self._columns):
            return f"the result has the columns {', '.join(row)}, and those before have {', '.join(self._columns)}"
        for name, cell in row.items():
            if cell is None:
                continue
            kind = "text" if isinstance(cell, str) else "a truth value" if isinstance(cell, bool) else "a number"
            if not isinstance(cell, str | int | float):
                return f"{name} of the result is a {type(cell).__name__}, which a table has not: write *.jsonl"
            before = self._kinds.setdefault(name, kind)
            if self._path.suffix == ".parquet" and (before != kind or (isinstance(cell, int) and abs(cell) >= 1 << 63)):
                return f"{name} of the result is {kind}, {cell!r:.80}, and was {before} before, which a column of Parquet has not"
            is_float = isinstance(cell, float)
            if self._path.suffix == ".parquet" and not isinstance(cell, str) and (is_float or abs(cell) > LARGEST):
                if name in (self._large if is_float else self._floats):
                    return f"{name} of the result, {cell!r}, is in a column of integers beyond 2^53 and fractions, which Parquet has not"
                (self._floats if is_float else self._large).add(name)
        self._columns = self._columns or tuple(row)
        return ""

    def write(self, values: Sequence[object]) -> None:
        self._rows += map(_row, values)
        if self._path.suffix != ".parquet" and self._columns is not None:
            self._write_csv()

    def _write_csv(self) -> None:
        assert self._columns is not None
        writer = CsvRows(self._file, "\t" if self._path.suffix == ".tsv" else ",")
        if not self._is_written:
            writer.rows([self._columns])
            self._is_written = True
        for row in self._rows:
            cells = (row.get(name) for name in self._columns)
            writer.rows([[cell if cell is None or isinstance(cell, str) else json.dumps(cell) for cell in cells]])
        self._rows.clear()
        self._file.flush()


def _row(value: object) -> Mapping[str, Any]:
    """A result as a row of a table."""
    if value is None:
        return {}
    return {str(name): cell for name, cell in value.items()} if isinstance(value, dict) else {RESULT: value}


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _items(path: Path) -> tuple[list[object], bytes, str]:
    """Items of a file, its content, and the ending that says how it is read."""
    try:
        data = sys.stdin.buffer.read() if str(path) == "-" else path.read_bytes()
    except OSError as e:
        raise JobError(f"items {path} cannot be read: {e.strerror}") from None
    items: list[object] = []
    if path.suffix in TABLES:
        from ephemeron.preparation.predicting import TableFile

        for part in TableFile(path).parts(_ROWS):
            items += part.table.to_pylist()
        if not items:
            raise JobError(f"items {path} has no rows")
        return items, data, path.suffix
    for number, line in text_lines(data, f"items {path}"):
        try:
            items.append(json.loads(line))
        except ValueError as e:
            raise JobError(f"items {path}, line {number} is no JSON: {e}", remedy="write one JSON value per line") from None
    if not items:
        raise JobError(f"items {path} has no items", remedy="write one JSON value per line")
    return items, data, ".jsonl"


def _check_out(out: Path) -> None:
    if not out.absolute().parent.is_dir():
        raise JobError(f"there is no folder {out.absolute().parent}", remedy="make it, or name another --out")
    if not os.access(out if out.exists() else out.absolute().parent, os.W_OK) or out.is_dir():
        raise JobError(f"{out} cannot be written", remedy="name another --out")


def _executor_options(flags: dict[str, Any]) -> dict[str, Any]:
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
@_pool_options
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
    from ephemeron.training.driver.result import result_of

    began = time.monotonic()
    is_table = data.suffix in TABLES
    if prepared is not None and not is_table:
        raise UserError(f"--prepared is for rows of a table, and {data} is none")
    if is_table:
        _check_out(out)
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
        **_executor_options(flags),
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
    report, bill = predict_table(result, data, out, prepared=prepared, batch_size=batch_size, best=best, **_executor_options(flags))
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
