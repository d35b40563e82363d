"""Data as people have it, as map-style datasets: arrays, tables, `datasets` objects, files and folders.

`data.source`, `Task.train_data` and `Flow.dataset` call `as_dataset` and so take the same values. docs/flows.md has the table of them.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ephemeron.config.typed import near
from ephemeron.data.formats.records import LARGEST
from ephemeron.data.samples import Array
from ephemeron.data.tables.arrow import beyond_float32, is_index, pyarrow
from ephemeron.errors import JobError

_ENDINGS = {
    "parquet": (".parquet",),
    "csv": (".csv", ".tsv", ".csv.gz", ".tsv.gz"),
    "images": (".jpg", ".jpeg", ".png", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff", ".tar", ".zip"),
}
"""Import kind -> endings of its files. An archive is of images."""
FILES = "files"
"""The source of a job that is a path."""
_SAVED, _SAVED_SPLITS = "state.json", "dataset_dict.json"
"""Files of the folders that `save_to_disk` of `datasets` writes."""
TESTS = ("test", "validation", "val")
"""Names of a test set beside `train`, in the order in which one is chosen."""


def as_dataset(value: Any, where: str, *, target: str | None = None) -> Any:
    """A map-style dataset: an object with `__len__` and `__getitem__`.

    Args:
        value: a pair of arrays, tensors, or a table and a column (`Pairs`); a table: a pandas or Polars frame, an Arrow table, or a
            dict of columns (`Rows`); a path, folder or glob of CSV or Parquet files, a folder of images with a folder for each class,
            or one that `datasets` saved; any object with a length and items by number.
        where: name of the value in messages.
        target: with rows of named columns, the one that becomes the second part of each sample, `(the other columns, target)`.

    Raises:
        JobError: it is none of these, its columns differ in length, or there is no such target.
        MissingExtra: a table or a file needs a package that is not installed.
        DatasetError: files cannot be read.
    """
    if isinstance(value, (str, Path)):
        return _of_files(value, where, target)
    if (columns := _columns(value, where)) is not None:
        return Rows(columns, where, target=target)
    if is_pair(value):
        _refuse_target(target, where, "a pair, whose second part is the target")
        return Pairs(*value, where=where)
    if isinstance(value, Mapping):
        arrays = "make an array of each column, or " if all(isinstance(each, (list, tuple)) for each in value.values()) else ""
        raise JobError(f"{where} is a {type(value).__name__} of {', '.join(map(str, value))}", remedy=f"{arrays}choose one of them")
    _check_map_style(value, where)
    return value if target is None else WithTarget(value, target, where)


def split_of(value: Any) -> tuple[Any, Any] | None:
    """Training and test set, where a value has both: a tuple of two, a mapping of splits such as `DatasetDict`, or a folder with a
    folder `train`; the test set is None where there is none. None: the value is one dataset."""
    if isinstance(value, (str, Path)):
        folder = Path(value)
        if (folder / _SAVED_SPLITS).is_file():
            return split_of(_datasets().load_from_disk(str(folder)))
        if not (folder / "train").is_dir():
            return None
        return folder / "train", next((folder / name for name in TESTS if (folder / name).is_dir()), None)
    if isinstance(value, Mapping) and "train" in value and not _is_column(value["train"]):
        return value["train"], next((value[name] for name in TESTS if name in value), None)
    if isinstance(value, tuple) and len(value) == 2 and not is_pair(value):
        return value
    return None


def is_place(name: str) -> bool:
    """Whether a text names files rather than a dataset of a store, `namespace/name`."""
    endings = tuple(ending for each in _ENDINGS.values() for ending in each)
    return "://" in name or name.startswith(("/", ".", "~")) or any(c in name for c in "*?[") or name.lower().endswith(endings)


def is_pair(value: Any) -> bool:
    """Whether a value is inputs and targets: two of arrays, tensors, tables and columns, the second of which is no table like the first."""
    if not (isinstance(value, (tuple, list)) and len(value) == 2):
        return False
    inputs, targets = value
    if not (_is_column(inputs) or _is_frame(inputs)):
        return False
    return _is_column(targets) or (_is_frame(targets) and list(targets.columns) != list(getattr(inputs, "columns", [])))


class Rows:
    """Rows of named columns as dicts, or as pairs of a dict and the target.

    Args:
        columns: arrays of one length.
        where: name in messages.
        target: column that becomes the second part of each sample.
    """

    def __init__(self, columns: Mapping[str, Array], where: str, *, target: str | None = None) -> None:
        lengths = {name: len(values) for name, values in columns.items()}
        if len(set(lengths.values())) > 1:
            raise JobError(f"{where} has columns of different lengths: {', '.join(f'{k} {n}' for k, n in lengths.items())}")
        _check_target(target, columns, where)
        self._length = next(iter(lengths.values()), 0)
        self._target = target
        self._columns = dict(columns)
        self._where = where

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        row = {name: values[index] for name, values in self._columns.items()}
        return row if self._target is None else _apart(row, self._target)

    def arrays(self) -> tuple[Array, Array]:
        """Inputs as numbers (`matrix`), and targets.

        Raises:
            JobError: no target was named, or a column has other values than numbers.
        """
        if self._target is None:
            raise no_target(self._where, self._columns)
        rest = {name: values for name, values in self._columns.items() if name != self._target and not is_index(name)}
        return matrix(rest, self._where), targets_of(self._columns[self._target], self._target, self._where)


class Pairs:
    """Inputs and targets, position by position.

    Args:
        inputs: array or tensor; or a table, whose columns become one array of numbers (`matrix`).
        targets: array, tensor, or a table or column.
        where: name in messages.

    Raises:
        JobError: they differ in length, or a table has other values than numbers.
    """

    def __init__(self, inputs: Any, targets: Any, *, where: str) -> None:
        given = _columns(inputs, where)
        self.inputs = inputs if given is None else matrix(given, where)
        named = _columns(targets, where)
        if named is not None:
            self.targets: Any = matrix(named, where) if len(named) > 1 else targets_of(*_only(named), where)
        else:
            self.targets = array_of(targets)
            if _is_series(targets):
                self.targets = targets_of(self.targets, str(getattr(targets, "name", None) or "targets"), where)
        if len(self.inputs) != len(self.targets):
            raise JobError(
                f"{where} has {len(self.inputs)} inputs but {len(self.targets)} targets", remedy="give one target for each input"
            )

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        return self.inputs[index], self.targets[index]

    def arrays(self) -> tuple[Array, Array]:
        """Both as arrays."""
        return array_of(self.inputs), array_of(self.targets)


def rows_of(samples: Sequence[Any], where: str, *, target: str | None = None) -> Rows:
    """Samples that are dicts, or pairs of a dict and the target, as rows.

    Raises:
        JobError: they differ in their columns.
    """
    pairs = not isinstance(samples[0], Mapping)
    rows = [sample[0] for sample in samples] if pairs else samples
    for number, row in enumerate(rows):
        if list(row) != list(rows[0]):
            raise JobError(f"{where}: sample {number} has the columns {', '.join(row)}, but sample 0 {', '.join(rows[0])}")
    columns = {str(name): _gathered([row[name] for row in rows]) for name in rows[0]}
    if not pairs or samples[0][1] is None:  # as a file's rows are where no target was named
        return Rows(columns, where)
    name = target or next(name for name in ("target", "the target") if name not in columns)
    return Rows({**columns, name: _gathered([sample[1] for sample in samples])}, where, target=name)


def _gathered(values: list[Any]) -> Array:
    """Values as an array; of objects where they differ in shape or are no plain values."""
    if not any(isinstance(value, (Mapping, str, bytes)) or value is None for value in values):
        try:
            return np.asarray(values)
        except (ValueError, TypeError):
            pass
    out = np.empty(len(values), dtype=object)
    out[:] = values
    return out


class WithTarget:
    """A dataset of dicts, or of pairs of a dict and nothing, as pairs of a dict and the target.

    Args:
        dataset: map-style.
        target: a key of its samples.
        where: name in messages.
    """

    def __init__(self, dataset: Any, target: str, where: str) -> None:
        self._dataset, self._target, self._where = dataset, target, where

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:
        row = self._dataset[index]
        if not isinstance(row, Mapping):
            raise JobError(
                f"{self._where}: sample {index} is {type(row).__name__}, which has no {self._target!r}", remedy="leave target out"
            )
        _check_target(self._target, row, self._where)
        return _apart(row, self._target)


def matrix(columns: Mapping[str, Array], where: str) -> Array:
    """Columns of numbers as one array: a single column as it is, or in float32 where it has fractions; more as float32 (rows, columns).

    Raises:
        JobError: a value is absent, no number or beyond float32, or lists stand beside other columns.
    """
    found = {name: _numbers(values, name, where) for name, values in columns.items()}
    if not found:
        raise JobError(f"{where} has no column besides the target")
    if len(found) == 1:
        return next(iter(found.values()))
    for name, values in found.items():
        if values.ndim > 1:
            raise JobError(f"{where}: column {name} has lists of numbers beside other columns", remedy="keep it alone, or use a data flow")
    return np.column_stack([values.astype(np.float32) for values in found.values()])


def targets_of(values: Array, name: str, where: str) -> Array:
    """A column as targets: whole numbers as int64, others as float32.

    Raises:
        JobError: a value is absent, no number, or beyond float32.
    """
    try:
        found = _numbers(values, name, where)
    except JobError as e:
        raise JobError(e.problem, remedy="number the classes from 0, for example with pandas.factorize") from None
    if found.dtype.kind == "u" and len(beyond := np.argwhere(found > np.iinfo(np.int64).max)):
        problem = f"{where}: column {name}, row {beyond[0][0] + 1}: {found[tuple(beyond[0])]} is beyond int64"
        raise JobError(problem, remedy="number the classes from 0, for example with pandas.factorize")
    return found.astype(np.int64) if found.dtype.kind in "biu" else found


def no_target(where: str, names: Iterable[str]) -> JobError:
    """Says that rows of named columns need a target to become pairs."""
    return JobError(f"{where} has rows of the columns {', '.join(names)}", remedy="name the one that is predicted: data.target_column")


def _numbers(values: Array, name: str, where: str) -> Array:
    """A column's values: fractions in float32.

    Raises:
        JobError: see `matrix`.
    """
    values = np.asarray(values)
    if values.dtype == object and len(values) and not isinstance(values[0], (str, bytes)) and np.ndim(values[0]) > 0:
        try:
            values = np.stack([np.asarray(value) for value in values])
        except ValueError:
            raise JobError(f"{where}: column {name} has lists of different lengths", remedy="pad them, or use a data flow") from None
    if len(values) and values.dtype.kind not in "biuf":
        kinds = (bool, int, float, np.number) if values.dtype == object else ()
        if (at := next((n for n, v in enumerate(values) if not isinstance(v, kinds)), None)) is not None:
            odd = values[at].item() if isinstance(values[at], np.generic) else values[at]
            problem = f"{where}: column {name}, row {at + 1}: {'the value is absent' if odd is None else f'{odd!r} is not a number'}"
            raise JobError(problem, remedy="leave the column out, or make numbers of it (docs/preparation.md)")
        try:
            values = values.astype(np.float64)  # integers beyond int64
        except OverflowError:
            raise JobError(f"{where}: column {name} has integers beyond float32") from None
    if values.dtype.kind != "f":
        return values
    if len(gaps := np.argwhere(np.isnan(values))):
        remedy = "fill it, or leave the row or column out (docs/preparation.md)"
        raise JobError(f"{where}: column {name}, row {gaps[0][0] + 1}: the value is absent", remedy=remedy)
    if len(beyond := np.argwhere(beyond_float32(values))):
        raise JobError(f"{where}: column {name}, row {beyond[0][0] + 1}: {float(values[tuple(beyond[0])])!r} is beyond float32")
    return values.astype(np.float32)


def _of_files(place: str | Path, where: str, target: str | None) -> Any:
    from ephemeron.data.catalog.importers import read_in_place

    if (Path(place) / _SAVED).is_file():
        saved = _datasets().load_from_disk(str(place))
        return as_dataset(saved, where, target=target)
    if (Path(place) / _SAVED_SPLITS).is_file() or (Path(place) / "dataset.json").is_file():
        what = "prepared table" if (Path(place) / "dataset.json").is_file() else "set of splits"
        raise JobError(f"{where}: {place} is a {what}", remedy='use source = "prepared"' if what[0] == "p" else "name the folder of one")
    return read_in_place(place, _ENDINGS, where=where, target=target)


def _datasets() -> Any:
    from ephemeron.errors import MissingExtra

    try:
        import datasets
    except ModuleNotFoundError:
        raise MissingExtra("datasets", "transformers") from None
    return datasets


def _columns(value: Any, where: str) -> dict[str, Array] | None:
    """Columns of a table or of a dict of columns; None: it is neither."""
    if isinstance(value, Mapping) and value and all(_is_column(each) for each in value.values()):
        return {str(name): array_of(each) for name, each in value.items()}
    if not _is_frame(value):
        return None
    names = [str(name) for name in getattr(value, "column_names", None) or value.columns]
    if twice := next((name for n, name in enumerate(names) if name in names[:n]), None):
        raise JobError(f"{where} has two columns {twice!r}", remedy="rename one of them")
    pandas = sys.modules.get("pandas")
    if pandas is not None and isinstance(value, pandas.DataFrame):
        columns = [_of_pandas(value.iloc[:, n].rename("column")) for n in range(len(names))]
    else:
        columns = [_of_arrow(column) for column in pyarrow().table(value).columns]
    return {name: values for name, values in zip(names, columns, strict=True) if not is_index(name)}


def _of_pandas(column: Any) -> Array:
    """A column's values; objects that Arrow has no type for as they are."""
    arrow = pyarrow()
    try:
        return _of_arrow(arrow.Table.from_pandas(column.to_frame(), preserve_index=False).column(0))
    except (arrow.ArrowException, TypeError, OverflowError):
        return np.asarray(column)


def _of_arrow(column: Any) -> Array:
    """A column's values; integers beside absent ones become floats, or stay objects where a float would round them."""
    if column.null_count and pyarrow().types.is_integer(column.type):
        whole = column.drop_null().to_numpy()
        if ((whole > LARGEST) | (whole < -LARGEST)).any():
            return np.array(column.to_pylist(), dtype=object)
    found: Array = column.to_numpy()
    return found


def _is_frame(value: Any) -> bool:
    """Whether it is a table of a library that gives it in Arrow's format; `datasets` objects have a format of their own."""
    if type(value).__module__.partition(".")[0] == "datasets":
        return False
    return hasattr(value, "__arrow_c_stream__") and (hasattr(value, "columns") or hasattr(value, "column_names"))


def _is_series(value: Any) -> bool:
    return hasattr(value, "to_numpy") and not hasattr(value, "columns")


def _is_column(value: Any) -> bool:
    """Whether it is an array, a tensor or a column of a table."""
    return (hasattr(value, "__array__") and not _is_frame(value) and np.ndim(value) > 0) if not isinstance(value, (str, bytes)) else False


def array_of(value: Any) -> Array:
    """An array, a tensor, a column or a number as an array."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return np.asarray(value.detach().cpu().numpy())
    return np.asarray(value.to_numpy() if _is_series(value) else value)


def _apart(row: Mapping[str, Any], target: str) -> tuple[dict[str, Any], Any]:
    return {name: value for name, value in row.items() if name != target}, row[target]


def _only(columns: Mapping[str, Array]) -> tuple[Array, str]:
    ((name, values),) = columns.items()
    return values, name


def _refuse_target(target: str | None, where: str, what: str) -> None:
    if target is not None:
        raise JobError(f"{where} is {what}, and takes no target {target!r}", remedy="leave target out")


def _check_target(target: str | None, names: Iterable[str], where: str) -> None:
    if target is not None and target not in names:
        raise JobError(f"{where} has no column {target!r}", remedy=near(target, list(names), what="it has"))


def _check_map_style(dataset: Any, where: str) -> None:
    utils = sys.modules.get("torch.utils.data")  # who returns one of torch's has imported it
    iterable = utils is not None and isinstance(dataset, utils.IterableDataset)
    kind = type(dataset)
    if iterable or not callable(getattr(kind, "__len__", None)) or not callable(getattr(kind, "__getitem__", None)):
        raise JobError(
            f"{where}: {kind.__name__} is not a map-style Dataset",
            remedy="give an object with __len__ and __getitem__, a table, a pair of arrays, or files",
        )
