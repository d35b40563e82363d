"""Readers of the sources that have a name.

CIFAR-10 and CIFAR-100 as a job's samples: from a folder or the published .tar.gz.

An archive is read member by member in memory; nothing is extracted. All batches must be present: training on four fifths of the
data because a download was interrupted should not look like a result.

Peak memory is about 1 GB for either, in the process that loads, not in a function.

NumPy's .npz files: the way in for anything that was prepared elsewhere.

Arrays keep the dtype they have in the file (whole numbers may be tokens, float64 may be meant). Arrays of Python
objects are pickles and are refused.

scikit-learn's 1797 handwritten digits, read from the file in the installed package.

Importing scikit-learn takes a second of CPU time, most of it for SciPy and pandas, and would be most of what a client does before
it starts a run of these digits. The file is a table of 64 values and a label for each digit.
"""

from __future__ import annotations

import gzip
import tarfile
import zipfile
import zlib
from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import asdict, dataclass, fields
from functools import cache
from glob import glob
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np

from ephemeron.config.typed import build
from ephemeron.data.formats.cifar import FORMS, CifarForm, find_form, labels_of, read_batch
from ephemeron.data.formats.idx import idx_files, parse_idx
from ephemeron.data.formats.lines import one_line
from ephemeron.data.samples import Array, Samples
from ephemeron.data.spec import DataSpec
from ephemeron.data.tables import Column, TableDataset
from ephemeron.data.tables.arrow import beyond_float32, columns_batch
from ephemeron.errors import DatasetError, DatasetNotFound, JobError, MissingExtra

_LARGEST_MEMBER = 2**29


@dataclass(frozen=True, slots=True, kw_only=True)
class CifarOptions:
    """Options of `cifar10`."""

    normalise: bool = True
    """Whether channels get mean 0 and standard deviation 1 over the training set."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cifar100Options(CifarOptions):
    """Options of `cifar100`."""

    labels: str = "fine"
    """`fine` (100 classes) or `coarse` (20)."""


def read_cifar(spec: DataSpec) -> tuple[Samples, Samples]:
    """Training and test samples. Options: `normalise` (default true) and, for CIFAR-100, `labels` ("fine", "coarse").

    Returns:
        Inputs float32 (N, 3, 32, 32) in [0, 1], or, normalised, with mean 0 and standard deviation 1 per channel
        over the training set; targets int64.

    Raises:
        JobError: a file is absent, damaged or unsafe, or an option is wrong.
    """
    options = read_options(spec, Cifar100Options if spec.source == "cifar100" else CifarOptions)
    name = options.labels if isinstance(options, Cifar100Options) else ""
    labels = labels_of(spec.source, name, "data.options.labels")
    path = need_path(spec, f"the folder {FORMS[spec.source][0].folder} or the published .tar.gz")
    form, place, files = _open(spec.source, path)
    train = [read_batch(place / name, files[name], form, labels) for name in form.train]
    test = read_batch(place / form.test, files[form.test], form, labels)
    pixels = np.concatenate([batch.inputs for batch in train])
    targets = np.concatenate([batch.targets for batch in train])
    scale = _channel_statistics(pixels) if options.normalise else None
    return Samples(_scaled(pixels, scale), targets), Samples(_scaled(test.inputs, scale), test.targets)


def _open(kind: str, path: Path) -> tuple[CifarForm, Path, dict[str, bytes]]:
    """The form that is there, the folder or archive that holds it, and the contents of all its files."""
    forms = FORMS[kind]
    wanted = {name for form in forms for name in form.names}
    if not path.is_dir():
        places = {path: _from_archive(path, wanted)}
    else:
        folders = [path / form.folder for form in forms if (path / form.folder).is_dir()]
        places = {folder: _from_folder(folder, wanted) for folder in [*folders, path]}
    for place, files in places.items():
        if (form := find_form(kind, files, place)) is not None:
            return form, place, files
    expected = " or ".join(f"{form.train[0]} ({form.folder})" for form in forms)
    raise JobError(f"{path} has no {expected}", remedy="give the unpacked folder or the published .tar.gz")


def _from_folder(folder: Path, names: Iterable[str]) -> dict[str, bytes]:
    try:
        return {name: (folder / name).read_bytes() for name in names if (folder / name).is_file()}
    except OSError as e:
        raise JobError(f"{folder} cannot be read: {one_line(e)}") from None


def _from_archive(path: Path, wanted: Set[str]) -> dict[str, bytes]:
    """Contents of the regular members of these names. Links and paths are of no consequence: nothing is written."""
    found: dict[str, bytes] = {}
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                name = member.name.rpartition("/")[2]
                if not member.isfile() or name not in wanted:
                    continue
                if name in found or member.size > _LARGEST_MEMBER:
                    raise JobError(f"{path} has a second or oversized {member.name}", remedy="fetch the archive again")
                stream = archive.extractfile(member)
                found[name] = stream.read() if stream is not None else b""
            _drain(archive)
    except (tarfile.TarError, OSError, EOFError, zlib.error) as e:
        raise JobError(f"{path} is not a valid tar archive: {one_line(e)}", remedy="fetch the archive again") from None
    return found


def _drain(archive: tarfile.TarFile) -> None:
    """Reads to the end: tar stops before it, and gzip's checksum comes last."""
    while archive.fileobj is not None and archive.fileobj.read(2**20):
        pass


def _channel_statistics(pixels: Array) -> tuple[Array, Array]:
    """Mean and standard deviation per channel of bytes scaled to [0, 1], exactly: from counts of the 256 values."""
    counts = np.zeros((3, 256), dtype=np.int64)
    for start in range(0, len(pixels), 1024):
        for channel in range(3):
            counts[channel] += np.bincount(pixels[start : start + 1024, channel].ravel(), minlength=256)
    values = np.arange(256) / 255
    weights = counts / counts.sum(axis=1, keepdims=True)
    mean = weights @ values
    deviation = np.sqrt((weights * (values - mean[:, np.newaxis]) ** 2).sum(axis=1))
    return mean, np.where(deviation > 0, deviation, 1.0)


def _scaled(pixels: Array, scale: tuple[Array, Array] | None) -> Array:
    values = pixels.astype(np.float32)
    values /= 255
    if scale is not None:
        mean, deviation = (s.astype(np.float32).reshape(1, 3, 1, 1) for s in scale)
        values -= mean
        values /= deviation
    return values


# -- checks that every reader makes: of its options and of its path -----------------------------------------------


Options = TypeVar("Options", bound=Any)


@dataclass(frozen=True, slots=True, kw_only=True)
class NoOptions:
    """Options of a source that takes none."""


def read_options(spec: DataSpec, cls: type[Options]) -> Options:
    """The options of a source.

    Args:
        spec: of the job's data.
        cls: dataclass of the source's options.

    Raises:
        JobError: an option is unknown or has another type.
    """
    if spec.options and not fields(cls):
        raise JobError(f"source {spec.source!r} takes no options, but has {', '.join(spec.options)}")
    return build(cls, spec.options, where="data.options")


def need_path(spec: DataSpec, what: str) -> Path:
    """`data.path`, which exists.

    Args:
        what: what the path should name, for the message.

    Raises:
        JobError: it is not given or does not exist.
    """
    if spec.path is None:
        raise JobError(f"source {spec.source!r} needs data.path", remedy=f"give {what}")
    if not spec.path.exists() and not glob(str(spec.path), recursive=True):
        raise JobError(f"data.path = {str(spec.path)!r} does not exist", remedy=f"give {what}")
    return spec.path


# -- numPy's .npz files -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NpzOptions:
    """Names of arrays in the file."""

    inputs: str = "x"
    targets: str = "y"
    test_inputs: str | None = None
    test_targets: str | None = None


def read_npz(spec: DataSpec) -> tuple[Samples, Samples | None]:
    """Training and, if the options name its arrays, test samples.

    Options: `inputs` (default "x"), `targets` ("y"), `test_inputs` and `test_targets`: names of arrays in the file.

    Raises:
        JobError: the file is no .npz, an array is absent or holds objects, or only one of the test arrays is named.
    """
    options = read_options(spec, NpzOptions)
    if (options.test_inputs is None) != (options.test_targets is None):
        absent = "test_inputs" if options.test_inputs is None else "test_targets"
        raise JobError(f"data.options.{absent} is missing", remedy="name both test_inputs and test_targets, or neither")
    names = {option: name for option, name in asdict(options).items() if name is not None}
    arrays = _npz_arrays(spec, names)
    train = Samples(arrays["inputs"], arrays["targets"])
    return train, Samples(arrays["test_inputs"], arrays["test_targets"]) if "test_inputs" in arrays else None


def _npz_arrays(spec: DataSpec, names: dict[str, str]) -> dict[str, Array]:
    path = need_path(spec, "an .npz file")
    try:
        content = np.load(path, allow_pickle=False)
        if not isinstance(content, np.lib.npyio.NpzFile):
            raise JobError(f"{path} holds a single array", remedy="save inputs and targets with numpy.savez")
        with content:
            for option, name in names.items():
                if name not in content.files:
                    raise JobError(
                        f"{path} has no array {name!r}, only {', '.join(sorted(content.files)) or 'none at all'}",
                        remedy=f"set data.options.{option}",
                    )
            return {option: content[name] for option, name in names.items()}
    except (OSError, ValueError, RuntimeError, EOFError, zipfile.BadZipFile, zlib.error) as e:
        raise JobError(f"{path} cannot be read: {one_line(e)}", remedy="give an .npz file of plain arrays") from None


# -- scikit-learn's 1797 handwritten digits -----------------------------------------------------------------------


_FILE = "datasets/data/digits.csv.gz"


def read_digits(spec: DataSpec) -> tuple[Samples, None]:
    """Inputs float32 (1797, 1, 8, 8) in [0, 1], targets int64.

    Raises:
        JobError: the source has options or a path.
        MissingExtra: scikit-learn is not installed.
    """
    read_options(spec, NoOptions)
    if spec.path is not None:
        raise JobError(f"source 'digits' reads no file, but data.path = {str(spec.path)!r}", remedy="leave data.path out")
    images, labels = _table()
    inputs = (images.reshape(-1, 1, 8, 8) / 16).astype(np.float32)
    return Samples(inputs, labels.astype(np.int64)), None


@cache
def _table() -> tuple[Array, Array]:
    """Values from 0 to 16, float64 (1797, 64), and labels, of 1 MB: a process that trains several jobs reads them once."""
    package = find_spec("sklearn")
    for folder in (package.submodule_search_locations or ()) if package is not None else ():
        path = Path(folder, _FILE)
        if path.is_file():
            with gzip.open(path, "rt") as file:
                table = np.loadtxt(file, delimiter=",")
            return table[:, :-1], table[:, -1]
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise MissingExtra("scikit-learn", "digits") from None
    images, labels = load_digits(return_X_y=True)
    return np.asarray(images), np.asarray(labels)


# -- MNIST's IDX files as a job's samples -------------------------------------------------------------------------


_FOLDER = "a folder with train-images-idx3-ubyte and train-labels-idx1-ubyte, each perhaps with .gz"


def read_idx_files(spec: DataSpec) -> tuple[Samples, Samples | None]:
    """Training and, if the folder has `t10k-…` files, test samples.

    Returns:
        Inputs float32, bytes scaled to [0, 1], rank 3 as (N, 1, H, W) and other ranks as they are; targets int64,
        or float32 where the file holds floating-point numbers.

    Raises:
        JobError: a file is absent, or not what its header says.
    """
    read_options(spec, NoOptions)
    folder = need_path(spec, _FOLDER)
    if not folder.is_dir():
        raise JobError(f"data.path = {str(folder)!r} is not a folder", remedy=f"give {_FOLDER}")
    files = {key: folder / name for key, name in idx_files(path.name for path in folder.iterdir()).items()}
    train = _pair(folder, files, "train")
    has_test = any(part == "t10k" for part, _ in files)
    return train, _pair(folder, files, "t10k") if has_test else None


def read_idx(path: Path) -> Array:
    """One IDX file, with or without gzip, as an array in native byte order.

    Raises:
        JobError: it cannot be read, its magic number is unknown, or it is shorter or longer than its header says.
    """
    return parse_idx(_contents(path), path)[0]


def _pair(folder: Path, files: dict[tuple[str, str], Path], part: str) -> Samples:
    for kind, rank in (("images", 3), ("labels", 1)):
        if (part, kind) not in files:
            raise JobError(f"{folder} has no file {part}-{kind}-idx{rank}-ubyte", remedy=f"give {_FOLDER}")
    inputs, targets = read_idx(files[part, "images"]), read_idx(files[part, "labels"])
    if inputs.ndim == 0 or targets.ndim == 0 or len(inputs) != len(targets):
        raise JobError(
            f"{files[part, 'images']} has shape {inputs.shape} but {files[part, 'labels'].name} has {targets.shape}",
            remedy="give files of the same data set",
        )
    return Samples(_as_inputs(inputs), targets.astype(np.float32 if targets.dtype.kind == "f" else np.int64))


def _as_inputs(array: Array) -> Array:
    values = array.astype(np.float32)
    if array.dtype == np.uint8:
        values /= 255
    return values[:, np.newaxis] if values.ndim == 3 else values


def _contents(path: Path) -> bytes:
    try:
        if path.suffix == ".gz":
            return gzip.decompress(path.read_bytes())
        return path.read_bytes()
    except (OSError, EOFError, zlib.error) as e:
        raise JobError(f"{path} cannot be read: {one_line(e)}", remedy="fetch the file again") from None


# -- prepared datasets with numeric columns (`data/tables`) -------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedOptions:
    """`data.options` of a prepared dataset."""

    batch: Literal["tensor", "dict"] = "tensor"
    """`tensor`: one tensor [samples, features] of all columns; `dict`: a tensor for each column, by name."""


def read_prepared(spec: DataSpec) -> tuple[Samples, Samples | None]:
    """Columns as inputs, and labels: whole numbers for classes, else float32.

    The path is that of a dataset, or of a folder with the datasets `train` and `test`. Inputs are one array float32 [samples, features] of
    numeric columns and vectors; with the option `batch = "dict"`, an array with a field for each column: numeric ones float32, codes int64,
    vectors float32 [entries].

    Raises:
        JobError: it is no such dataset, a column is of another kind, a value is absent or beyond float32, or there is no label.
        MissingExtra: pyarrow is not installed.
    """
    options = read_options(spec, PreparedOptions)
    path = need_path(spec, "a prepared dataset")
    found = [_samples(part, options) for part in prepared_parts(path)]
    return found[0], found[1] if len(found) > 1 else None


def prepared_parts(path: Path) -> list[Path]:
    """Folders of the training and, if there is one, of the test dataset."""
    if (path / "train").is_dir():
        return [path / name for name in ("train", "test") if (path / name).is_dir()]
    return [path]


def _samples(path: Path, options: PreparedOptions) -> Samples:
    try:
        dataset = TableDataset.open(str(path))
        check_columns(dataset.schema, options, where=str(path))
        parts = [columns_batch(table) for table in dataset.tables()]
    except (DatasetNotFound, DatasetError) as e:
        raise JobError(str(e)) from None
    labels = [part for _, part in parts if part is not None]
    if len(labels) < len(parts) or not parts:
        raise JobError(f"{path} has no label", remedy="name its column in the recipe: [label] column = …")
    columns = {name: np.concatenate([batch[name] for batch, _ in parts]) for name in parts[0][0]}
    targets = np.concatenate(labels)
    label = next(column.name for column in dataset.schema if column.kind == "label")
    check_values({**columns, label: targets}, where=str(path))
    whole = bool(np.all(targets == np.floor(targets))) and targets.dtype != np.float64
    return Samples(table_inputs(columns, options), targets.astype(np.int64 if whole else np.float32))


def check_columns(schema: Sequence[Column], options: PreparedOptions, *, where: str) -> None:
    """Refuses columns that a batch does not take.

    Raises:
        JobError: names the first of them.
    """
    for column in schema:
        if column.kind == "categorical":
            raise JobError(
                f"{where}: column {column.name} is not numeric", remedy="prepare it with one_hot, ordinal or hash, or leave it out"
            )
        if column.kind == "sparse":
            raise JobError(f"{where}: column {column.name} is sparse", remedy="leave it out, or train a sparse model (docs/sparse.md)")
        if column.kind == "ordinal" and options.batch == "tensor":
            raise JobError(
                f"{where}: column {column.name} has codes, which are no numbers", remedy='set data.options.batch = "dict", or use one_hot'
            )
    if all(column.kind == "label" for column in schema):
        raise JobError(f"{where} has no columns beside the label")


def check_values(columns: Mapping[str, Array], *, where: str) -> None:
    """Refuses values that no model is given.

    Raises:
        JobError: a value is absent, or beyond float32; names column and row, from 1.
    """
    for name, values in columns.items():
        if values.dtype.kind != "f":
            continue
        if len(absent := np.argwhere(np.isnan(values))):
            raise JobError(
                f"{where} has absent values: column {name}, row {absent[0][0] + 1}", remedy="prepare it with impute or drop_missing"
            )
        if len(beyond := np.argwhere(beyond_float32(values))):
            raise JobError(
                f"{where}: column {name}, row {beyond[0][0] + 1}: {float(values[tuple(beyond[0])])!r} is beyond float32",
                remedy="scale the column when the data is prepared",
            )


def table_inputs(columns: Mapping[str, Array], options: PreparedOptions) -> Array:
    """Inputs of columns by name, as a job takes them; see `read_prepared`."""
    if options.batch == "tensor":
        rows = len(next(iter(columns.values()))) if columns else 0
        return np.column_stack([np.empty((rows, 0), np.float32), *columns.values()]).astype(np.float32)
    kinds = {name: values.dtype if values.dtype.kind == "i" else np.dtype(np.float32) for name, values in columns.items()}
    order = sorted(columns, key=lambda name: -kinds[name].itemsize)  # keeps every field aligned
    made = np.empty(len(columns[order[0]]), [(name, kinds[name], columns[name].shape[1:]) for name in order])
    for name in order:
        made[name] = columns[name]
    return made
