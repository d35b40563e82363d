"""Predictions and evaluations of tables: the saved pipeline of a run makes its features of the rows of a CSV or Parquet file, part by part.

    file ──parts of some thousand rows──▶ pipeline (here) ──features──▶ model (functions) ──▶ the same rows, with columns of predictions

All rows of the file are in the result, in their order. One that has no features, since a step drops or refuses it or a value is none of
its column, has no prediction. Texts of CSV stay as they are written.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ephemeron.data.batch_source import Positions, TrainingBatch
from ephemeron.data.sources.readers import PreparedOptions, check_columns, prepared_parts, read_options, table_inputs
from ephemeron.data.tables import TableDataset
from ephemeron.data.tables.arrow import beyond_float32, pyarrow
from ephemeron.data.tables.manifest import MANIFEST, PIPELINE, Column
from ephemeron.data.tables.table_file import TableFile, TablePart, table_written
from ephemeron.errors import DatasetError, DatasetNotFound, JobError, UserError
from ephemeron.executor.executor import FunctionExecutor
from ephemeron.executor.predict import Predictor, modules_kept, predictor_of, tried
from ephemeron.executor.prediction_files import Outputs
from ephemeron.functions.entries import PRELOADS
from ephemeron.preparation.columns import Categories, ColumnData, SparseRows, from_table, taken
from ephemeron.preparation.load_plan import MISSING
from ephemeron.preparation.parquet import typed
from ephemeron.preparation.pipeline import Pipeline
from ephemeron.preparation.values import arrow_kind
from ephemeron.runs.folders import CODE_FILE, JOB_FILE, PREPARED, RESULT_FILE, RUN_FILE, RunFolder
from ephemeron.runs.kinds import load_kind
from ephemeron.training.driver.launching.evaluation import evaluate
from ephemeron.training.driver.result import Result
from ephemeron.training.driver.trained import best_weights, job_of_run, stored_job

if TYPE_CHECKING:
    from ephemeron.executor.session import Bill
    from ephemeron.runs.metrics import Metrics

PREDICTION = "prediction"
"""Name of the column of a model's only output, and beginning of those of others."""
_WAVE = 4
"""Parts for each function that are read ahead of results."""
_TOLD = 5
"""Rows without a prediction that are told, at most."""
_MOST_COLUMNS = 1000


# -- features of rows ---------------------------------------------------------------------------------------------


class Made(NamedTuple):
    """Features of rows."""

    inputs: Any
    """An array with a row for each, or `SparseRows`."""
    labels: NDArray[Any] | None
    numbers: NDArray[np.int64]
    """Of these rows, among those that were given."""
    refused: Mapping[int, tuple[str, str]]
    """Column and reason of rows that have no features; those that are in neither were dropped."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """How rows become what a run's model is given."""

    schema: tuple[Column, ...]
    """Columns that the run trained on."""
    pipeline: Pipeline | None
    options: PreparedOptions
    missing: tuple[str, ...]
    delimiter: str
    is_sparse: bool

    @property
    def columns(self) -> tuple[Column, ...]:
        """Columns of the rows, with the label."""
        return self.schema if self.pipeline is None else self.pipeline.schema_in_

    def check(self, file: TableFile, *, labelled: bool) -> None:
        """Refuses a file that lacks a column, or has values in it that are neither numbers nor text.

        Raises:
            JobError: names the column.
        """
        types = pyarrow().types
        for column in self._needed(labelled=labelled):
            if column.name not in file.names:
                raise JobError(f"{file.path} has no column {column.name!r}", remedy=f"it has {', '.join(file.names)}")
            kind = file.schema.field(column.name).type
            if arrow_kind(kind) is None and not types.is_null(kind):
                raise JobError(f"{file.path}: column {column.name} is {kind}, neither numbers nor text", remedy="convert it")

    def _needed(self, *, labelled: bool) -> list[Column]:
        return [column for column in self.columns if labelled or column.kind != "label"]

    def of(self, table: Any, *, is_text: bool, labelled: bool = False) -> Made:
        """Features of the rows of a part of a file.

        Args:
            table: the rows.
            is_text: whether they are of CSV, where some texts stand for absent values, as in a load.
            labelled: whether they have labels.
        """
        pa = pyarrow()
        columns = self._needed(labelled=labelled)
        absent = pa.array(self.missing, pa.string())
        read = {}
        for column in columns:
            values = table.column(column.name)
            if is_text and self.missing:
                values = pa.compute.if_else(pa.compute.is_in(values, value_set=absent), None, values)
            read[column.name] = values
        numeric = [Column(name=c.name, kind="numeric", dtype="float64") if c.kind == "label" else c for c in columns]
        found, wrong = typed(pa.table(read), numeric)
        rows, refused = from_table(found, numeric), dict(wrong)
        for column in columns:
            if column.kind in ("numeric", "label"):
                for row in np.flatnonzero(np.isinf(rows[column.name])).tolist():  # type: ignore[arg-type]
                    refused.setdefault(row, (column.name, "is infinite"))
            if column.kind == "label":
                for row in np.flatnonzero(np.isnan(rows[column.name])).tolist():  # type: ignore[arg-type]
                    refused.setdefault(row, (column.name, "is absent, and an evaluation needs a label"))
        numbers = np.arange(found.num_rows)
        if refused:
            kept = np.isin(numbers, list(refused), invert=True)
            rows, numbers = taken(rows, kept), numbers[kept]
        if self.pipeline is not None:
            rows, left, more = self.pipeline.apply_valid(rows)
            refused.update({int(numbers[row]): why for row, why in more.items()})
            numbers = numbers[left]
        return self._checked(rows, numbers, refused)

    def _checked(self, rows: dict[str, ColumnData], numbers: NDArray[np.int64], refused: dict[int, tuple[str, str]]) -> Made:
        label = next((rows[c.name] for c in self.schema if c.kind == "label" and c.name in rows), None)
        labels = None if label is None or isinstance(label, Categories | SparseRows) else self._labels(label)
        if self.is_sparse:
            sparse = next(rows[c.name] for c in self.schema if c.kind == "sparse")
            return Made(sparse, labels, numbers, refused)
        made: dict[str, NDArray[Any]] = {c.name: rows[c.name] for c in self.schema if c.kind != "label"}  # type: ignore[misc]
        bad: dict[int, tuple[str, str]] = {}
        for name, values in made.items():
            if values.dtype.kind == "f":
                for row in np.flatnonzero(np.isnan(values) if values.ndim == 1 else np.isnan(values).any(1)).tolist():
                    bad.setdefault(row, (name, "is absent"))
                for row in np.flatnonzero(beyond_float32(values) if values.ndim == 1 else beyond_float32(values).any(1)).tolist():
                    bad.setdefault(row, (name, "is beyond float32"))
        if bad:
            refused.update({int(numbers[row]): why for row, why in bad.items()})
            kept = np.isin(np.arange(len(numbers)), list(bad), invert=True)
            made, numbers = {name: values[kept] for name, values in made.items()}, numbers[kept]
            labels = None if labels is None else labels[kept]
        return Made(table_inputs(made, self.options), labels, numbers, refused)

    def _labels(self, values: NDArray[Any]) -> NDArray[Any]:
        dtype = next(c.dtype for c in self.schema if c.kind == "label")
        return np.asarray(values, np.float32 if dtype == "float64" or self.is_sparse else np.int64)


def features_of(folder: RunFolder, prepared: Path | None = None) -> Features:
    """How rows become what a run's model is given, as it was when the run was launched.

    Args:
        folder: of the run.
        prepared: another dataset whose pipeline is used: its folder, or one with `train`.

    Raises:
        UserError: the run was not trained on a prepared dataset, or none is found.
    """
    job = stored_job(folder)
    if job.data.source != "prepared":
        raise UserError(
            f"run {folder.run_id} was not trained on a prepared table, so columns of a table say nothing to it; "
            "give its inputs as *.npz, *.npy or *.jsonl"
        )
    place = prepared_parts(prepared)[0] if prepared is not None else folder.path / PREPARED
    if prepared is None and not place.is_dir() and job.data.path is not None:  # of an earlier release
        place = prepared_parts(job.data.path)[0]
    try:
        dataset = TableDataset.open(str(place))
    except (DatasetNotFound, DatasetError) as e:
        raise UserError(f"the pipeline of run {folder.run_id} is not found ({e}); name the folder of its dataset by --prepared") from None
    is_sparse = job.sparse is not None
    options = PreparedOptions() if is_sparse else read_options(job.data, PreparedOptions)
    pipeline = None if dataset.manifest.pipeline is None else Pipeline.load(dataset)
    if is_sparse and not any(column.kind == "sparse" for column in dataset.schema):
        raise UserError(f"{place} has no sparse column, and run {folder.run_id} is of a sparse job")
    if is_sparse and pipeline is None:
        raise UserError(f"{place} was made by no pipeline, so rows of a table have no features")
    if not is_sparse:
        check_columns(dataset.schema, options, where=str(place))
    missing = dataset.manifest.missing
    return Features(
        schema=dataset.schema,
        pipeline=pipeline,
        options=options,
        missing=MISSING if missing is None else missing,
        delimiter=dataset.manifest.delimiter,
        is_sparse=is_sparse,
    )


def dataset_files(folder: Path) -> dict[str, bytes]:
    """Manifest and pipeline of a dataset, by their names; a folder with them stands for it in a prediction."""
    place = prepared_parts(folder)[0]
    return {name: (place / name).read_bytes() for name in (MANIFEST, PIPELINE) if (place / name).exists()}


def files_of(result: Result, *, best: bool = False) -> dict[str, bytes]:
    """Files of a run's folder that predictions of tables need, by their names; a folder with them is one of a run.

    Args:
        result: of the run.
        best: weights of the best evaluation.

    Raises:
        UserError: the run has none of these weights.
    """
    folder = result.folder
    weights = best_weights(folder) if best else folder.weights
    names = (RUN_FILE, RESULT_FILE, JOB_FILE, CODE_FILE, *(f"{PREPARED}/{name}" for name in (MANIFEST, PIPELINE)))
    files = {name: (folder.path / name).read_bytes() for name in names if (folder.path / name).exists()}
    return {**files, folder.weights.name: weights.read_bytes()}


# -- predictions --------------------------------------------------------------------------------------------------


@dataclass
class SparsePredictor:
    """A trained sparse model as a function of sparse rows."""

    model: Any
    """Has `predict`."""

    def __call__(self, inputs: Mapping[str, SparseRows]) -> Outputs:
        return {"y": np.asarray(self.model.predict(inputs["x"]))}


@dataclass(slots=True, kw_only=True)
class TableReport:
    """Rows of a file, and those without features."""

    rows: int = 0
    dropped: int = 0
    """By `drop_missing`."""
    refused: int = 0
    """Values that no features are made of."""
    told: list[str] = field(default_factory=list)
    """The first of them: row, column and reason."""
    columns: list[str] = field(default_factory=list)
    """Names of the columns of predictions."""

    def add(self, part: TablePart, made: Made) -> None:
        """Counts the rows of a part."""
        self.rows += part.table.num_rows
        self.refused += len(made.refused)
        self.dropped += part.table.num_rows - len(made.numbers) - len(made.refused)
        for row in sorted(made.refused)[: _TOLD - len(self.told)]:
            column, reason = made.refused[row]
            self.told.append(f"row {part.first + row + 1}, column {column}: {reason}")


def predict_table(
    result: Result, data: Path, out: Path, *, prepared: Path | None = None, batch_size: int = 256, best: bool = False, **options: Any
) -> tuple[TableReport, Bill]:
    """Writes the rows of a table with a run's predictions, computed by functions.

    Args:
        result: of the run, which was trained on a prepared dataset.
        data: `.csv` or `.tsv` with a header, or `.parquet`, with the columns from which the dataset was prepared; the label may be missing.
        out: file of the same kinds. It has all rows and columns, and the predictions: `prediction`, or `prediction_0`, … of an output with
            several numbers, `prediction_NAME` of a named one. They are null in rows that have no features.
        prepared: see `features_of`.
        batch_size: rows of one task.
        best: weights of the best evaluation.
        options: of `FunctionExecutor`.

    Raises:
        UserError: the run, the file or an output of the model is refused.
        TaskFailed: the model raised.
    """
    if batch_size < 1:
        raise JobError(f"batch_size = {batch_size} is below 1")
    features = features_of(result.folder, prepared)
    file = TableFile(data, delimiter=features.delimiter)
    features.check(file, labelled=False)
    report = TableReport()
    predictor = _predictor(result, features, best=best)
    first = next((m for m in (features.of(part.table, is_text=file.is_text) for part in file.parts(batch_size)) if len(m.numbers)), None)
    if first is None:
        raise JobError(f"{data} has no row that features can be made of", remedy="look at its columns, and at those that rows must have")
    if isinstance(predictor, Predictor):
        predictor = tried(predictor, {"x": first.inputs}, on_trial=lambda outputs: _check_outputs(outputs, file))
    else:
        _check_outputs(predictor({"x": first.inputs}), file)
    preload = PRELOADS["predict"] if isinstance(predictor, Predictor) else ()
    with (
        modules_kept(),
        FunctionExecutor(name="predict", preload=preload, **options) as pool,
        table_written(out, delimiter=file.delimiter) as written,
    ):
        for part, made, outputs in _predicted(pool, predictor, features, file, batch_size):
            report.add(part, made)
            table = part.table
            for name, column in _columns(outputs or _like(predictor, first), made.numbers, table.num_rows, is_empty=outputs is None):
                table = table.append_column(name, column)
            report.columns = table.column_names[len(file.names) :]
            written.write(table)
    return report, pool.bill()


def _predictor(result: Result, features: Features, *, best: bool) -> Predictor | SparsePredictor:
    if not features.is_sparse:
        return predictor_of(result, best=best)
    if best:
        raise UserError("--best is for jobs of PyTorch")
    return SparsePredictor(load_kind("sparse").load_model(result.folder.path))


def _like(predictor: Predictor | SparsePredictor, first: Made) -> Outputs:
    """Outputs with the names and shapes of all others, for a part without features."""
    return predictor({"x": first.inputs[:1]}) if isinstance(predictor, Predictor) else predictor({"x": first.inputs})


def _predicted(
    pool: FunctionExecutor, predictor: Predictor | SparsePredictor, features: Features, file: TableFile, batch_size: int
) -> Iterator[tuple[TablePart, Made, Outputs | None]]:
    """The parts of a file, their features, and what the model makes of them. A wave of parts is read while functions compute another one."""
    waiting: list[Any] = []
    parts = ((part, features.of(part.table, is_text=file.is_text)) for part in file.parts(batch_size))
    size = max(1, pool.max_workers) * _WAVE
    while True:
        wave = [one for _, one in zip(range(size), parts, strict=False)]
        some = [{"x": made.inputs} for _, made in wave if len(made.numbers)]
        futures = iter(pool.map_futures(predictor, some) if some else [])
        yield from waiting and _results(waiting)
        if not wave:
            return
        waiting = [(part, made, next(futures) if len(made.numbers) else None) for part, made in wave]


def _results(waiting: list[Any]) -> Iterator[tuple[TablePart, Made, Outputs | None]]:
    for part, made, future in waiting:
        yield part, made, None if future is None else future.result()


def _names(outputs: Outputs) -> Iterator[tuple[str, str, int | None]]:
    """Names of the columns of outputs: that of the column, that of the output, and of its rows' numbers which one."""
    for name, array in outputs.items():
        base = PREDICTION if name == "y" else f"{PREDICTION}_{name}"
        if array.ndim > 2 or (array.ndim == 2 and array.shape[1] > _MOST_COLUMNS):
            shape = list(array.shape[1:])
            raise JobError(
                f"output {name} of the model has rows of the shape {shape}, which are no columns", remedy="give its task a predict_step"
            )
        if array.dtype.kind == "c":
            raise JobError(f"output {name} of the model is {array.dtype}, which tables have not", remedy="give its task a predict_step")
        if array.ndim == 1 or array.shape[1] == 1:
            yield base, name, None
        else:
            yield from ((f"{base}_{k}", name, k) for k in range(array.shape[1]))


def _check_outputs(outputs: Outputs, file: TableFile) -> None:
    for column, _, _ in _names(outputs):
        if column in file.names:
            raise JobError(f"{file.path} has a column {column!r} already, which predictions would have", remedy="rename it")


def _columns(outputs: Outputs, numbers: NDArray[np.int64], rows: int, *, is_empty: bool) -> Iterator[tuple[str, Any]]:
    """Columns of predictions by name, null in rows that have none."""
    pa = pyarrow()
    absent = np.ones(rows, bool)
    absent[numbers] = False
    for column, name, k in _names(outputs):
        values = outputs[name] if k is None else outputs[name][:, k]
        made = np.zeros(rows, values.dtype if values.dtype != np.float16 else np.float32)
        if not is_empty:
            made[numbers] = values.reshape(-1)
        yield column, pa.array(made, mask=absent)


# -- evaluations --------------------------------------------------------------------------------------------------


def evaluate_table(result: Result, data: Path, *, prepared: Path | None = None, best: bool = False) -> tuple[Metrics, TableReport]:
    """Metrics of a run's model on the rows of a table, on this machine.

    Args:
        result, data, prepared, best: as for `predict_table`; the file has the label.

    Raises:
        UserError: the run or the file is refused, or the program raises.
    """
    features = features_of(result.folder, prepared)
    file = TableFile(data, delimiter=features.delimiter)
    if not any(column.kind == "label" for column in features.columns):
        raise UserError(f"run {result.folder.run_id} was trained on a table without a label")
    features.check(file, labelled=True)
    report = TableReport()
    feed = _TableBatches(file, features, report)
    if features.is_sparse:
        if best:
            raise UserError("--best is for jobs of PyTorch")
        model = load_kind("sparse").load_model(result.folder.path)
        metrics: Metrics = model.evaluate_rows((made.inputs, made.labels) for made in feed.made())
    else:
        metrics = evaluate(job_of_run(result.folder), result.state_dict(best=best), feed)
    if report.rows == report.dropped + report.refused:
        raise JobError(f"{data} has no row that features can be made of", remedy="look at its columns, and at those that rows must have")
    return metrics, report


class _TableBatches:
    """A batch source of the rows of a file, for an evaluation."""

    test_samples = 1

    def __init__(self, file: TableFile, features: Features, report: TableReport) -> None:
        self._file, self._features, self._report = file, features, report

    def made(self) -> Iterator[Made]:
        """Features of all rows that have some."""
        from ephemeron.data.batch_source import EVALUATION_BATCH

        for part in self._file.parts(EVALUATION_BATCH):
            made = self._features.of(part.table, is_text=self._file.is_text, labelled=True)
            self._report.add(part, made)
            if len(made.numbers):
                yield made

    def batch(self, positions: Positions, iteration: int) -> TrainingBatch:
        return TrainingBatch(None, 0)

    def tests(self) -> Iterator[TrainingBatch]:
        return (TrainingBatch((made.inputs, made.labels), len(made.numbers)) for made in self.made())

    def close(self) -> None:
        pass
