"""CIFAR-10 and CIFAR-100 as published (Krizhevsky 2009): binary or pickled batches, in a folder or the .tar.gz.

Records of the binary version are 1 label byte (CIFAR-100: coarse, then fine) and 3072 pixel bytes, channel by
channel, row by row. The pickled version is read by `ephemeron.data.sources.unpickle`, which runs nothing. An archive is read
member by member in memory; nothing is extracted. All batches must be there: training on four fifths of the
data because a download broke off should not look like a result.

Peak memory is about 1 GB for either, in the process that loads, not in a function.
"""

from __future__ import annotations

import tarfile
import zlib
from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ephemeron.data.samples import Array, Samples
from ephemeron.data.sources.options import need_path, one_line, read_options
from ephemeron.data.sources.unpickle import PickledArray, load_plain
from ephemeron.data.spec import DataSpec
from ephemeron.errors import JobError, PickleRefused

PIXELS = 3 * 32 * 32
_LARGEST_MEMBER = 2**29


@dataclass(frozen=True, slots=True)
class Form:
    """One published form of a data set."""

    pickled: bool
    folder: str
    train: tuple[str, ...]
    test: str
    label_bytes: int = 1

    @property
    def names(self) -> tuple[str, ...]:
        return (*self.train, self.test)


FORMS = {
    "cifar10": (
        Form(False, "cifar-10-batches-bin", tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
        Form(True, "cifar-10-batches-py", tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch"),
    ),
    "cifar100": (
        Form(False, "cifar-100-binary", ("train.bin",), "test.bin", label_bytes=2),
        Form(True, "cifar-100-python", ("train",), "test", label_bytes=2),
    ),
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class CifarLabels:
    """Which labels to take: their key in the pickles, their byte in the records, and how many classes there are."""

    key: str
    position: int
    classes: int


LABELS = {
    "cifar10": {"": CifarLabels("labels", 0, 10)},
    "cifar100": {"coarse": CifarLabels("coarse_labels", 0, 20), "fine": CifarLabels("fine_labels", 1, 100)},
}


def read(spec: DataSpec) -> tuple[Samples, Samples]:
    """Training and test samples. Options: `normalise` (default true) and, for CIFAR-100, `labels` ("fine", "coarse").

    Returns:
        Inputs float32 (N, 3, 32, 32) in [0, 1], or, normalised, with mean 0 and standard deviation 1 per channel
        over the training set; targets int64.

    Raises:
        JobError: a file is absent, damaged or unsafe, or an option is wrong.
    """
    defaults: dict[str, Any] = {"normalise": True}
    if spec.source == "cifar100":
        defaults["labels"] = "fine"
    options = read_options(spec, defaults)
    labels = _choose(spec.source, options.get("labels", ""))
    path = need_path(spec, f"the folder {FORMS[spec.source][0].folder} or the published .tar.gz")
    form, place, files = _open(path, FORMS[spec.source])
    train = [read_batch(place / name, files[name], form, labels) for name in form.train]
    test = read_batch(place / form.test, files[form.test], form, labels)
    pixels = np.concatenate([batch.inputs for batch in train])
    targets = np.concatenate([batch.targets for batch in train])
    scale = _channel_statistics(pixels) if options["normalise"] else None
    return Samples(_scaled(pixels, scale), targets), Samples(_scaled(test.inputs, scale), test.targets)


def _choose(source: str, name: str) -> CifarLabels:
    choices = LABELS[source]
    if name not in choices:
        raise JobError(f"data.options.labels = {name!r} is not known", remedy=f"use one of {', '.join(choices)}")
    return choices[name]


def _open(path: Path, forms: Sequence[Form]) -> tuple[Form, Path, dict[str, bytes]]:
    """The form that is there, the folder or archive it is in, and the contents of all its files."""
    archive = None if path.is_dir() else _from_archive(path, {name for form in forms for name in form.names})
    for form in forms:
        place = path if archive is not None or not (path / form.folder).is_dir() else path / form.folder
        files = _from_folder(place, form.names) if archive is None else archive
        missing = [name for name in form.names if name not in files]
        if not missing:
            return form, place, files
        if len(missing) < len(form.names):
            raise JobError(f"{place} has no {', '.join(missing)}", remedy="fetch the data set again")
    wanted = " or ".join(f"{form.train[0]} ({form.folder})" for form in forms)
    raise JobError(f"{path} has no {wanted}", remedy="give the unpacked folder or the published .tar.gz")


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
        raise JobError(f"{path} is not a sound tar archive: {one_line(e)}", remedy="fetch the archive again") from None
    return found


def _drain(archive: tarfile.TarFile) -> None:
    """Reads to the end: tar stops before it, and gzip's checksum comes last."""
    while archive.fileobj is not None and archive.fileobj.read(2**20):
        pass


def read_batch(where: Path | str, data: bytes, form: Form, labels: CifarLabels) -> Samples:
    """One file: inputs uint8 (N, 3, 32, 32), targets int64.

    Args:
        where: what to call it in messages.
        data: its bytes.
        form: which form it is in.
        labels: which to take.

    Raises:
        JobError: it is damaged, or its labels are out of range.
    """
    pixels, targets = _pickled(where, data, labels) if form.pickled else _binary(where, data, form, labels)
    wrong = np.flatnonzero((targets < 0) | (targets >= labels.classes))
    if len(wrong):
        raise JobError(
            f"{where} has label {targets[wrong[0]]} at record {wrong[0]}, but there are {labels.classes} classes",
            remedy="check that data.source names the data set of this path",
        )
    return Samples(pixels.reshape(-1, 3, 32, 32), targets)


def _binary(where: Path | str, data: bytes, form: Form, labels: CifarLabels) -> tuple[Array, Array]:
    record = form.label_bytes + PIXELS
    if not data or len(data) % record:
        raise JobError(f"{where} has {len(data)} bytes, not a multiple of {record}", remedy="fetch the data set again")
    rows = np.frombuffer(data, dtype=np.uint8).reshape(-1, record)
    return rows[:, form.label_bytes :], rows[:, labels.position].astype(np.int64)


def pickled_pixels(data: bytes) -> Array:
    """The pixels of a pickled batch, uint8 (N, 3072).

    Raises:
        Refused: it is damaged, asks for more than arrays, or has none of that kind.
    """
    pixels = _table(data).get("data")
    array = pixels.array if isinstance(pixels, PickledArray) else None
    if array is None or array.dtype != np.uint8 or array.shape[1:] != (PIXELS,):
        raise PickleRefused(f"its 'data' is no array of uint8 (N, {PIXELS})")
    return array


def _table(data: bytes) -> dict[Any, Any]:
    content = load_plain(data)
    if not isinstance(content, dict):
        raise PickleRefused(f"it holds {type(content).__name__}, not a table")
    return {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in content.items()}


def _pickled(where: Path | str, data: bytes, labels: CifarLabels) -> tuple[Array, Array]:
    try:
        table = _table(data)
    except PickleRefused as e:
        raise JobError(
            f"{where} is not a pickled CIFAR batch: {one_line(e)}", remedy="fetch the data set again"
        ) from None
    pixels, targets = table.get("data"), table.get(labels.key)
    if not isinstance(pixels, PickledArray) or not isinstance(targets, list):
        raise JobError(f"{where} lacks 'data' or {labels.key!r}; it has {', '.join(map(str, table))}")
    array = pixels.array
    if array is None or array.dtype != np.uint8 or array.shape != (len(targets), PIXELS) or not targets:
        shape = "no array" if array is None else f"{array.dtype} {array.shape}"
        raise JobError(f"{where}: 'data' is {shape}, not uint8 ({len(targets)}, {PIXELS})")
    if not all(isinstance(label, int) for label in targets):
        raise JobError(f"{where}: {labels.key!r} are not all whole numbers")
    return array, np.array(targets, dtype=np.int64)


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
