"""CIFAR-10 and CIFAR-100 as published (Krizhevsky 2009): binary or pickled batches.

Records of the binary version are 1 label byte (CIFAR-100: coarse, then fine) and 3072 pixel bytes, channel by channel, row by
row. The pickled version is read by `ephemeron.data.formats.unpickle`, which executes nothing.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ephemeron.data.formats.one_line import one_line
from ephemeron.data.formats.unpickle import PickledArray, load_plain
from ephemeron.data.samples import Array, Samples
from ephemeron.errors import JobError, PickleRefused

PIXELS = 3 * 32 * 32


@dataclass(frozen=True, slots=True)
class CifarForm:
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
        CifarForm(False, "cifar-10-batches-bin", tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test_batch.bin"),
        CifarForm(True, "cifar-10-batches-py", tuple(f"data_batch_{i}" for i in range(1, 6)), "test_batch"),
    ),
    "cifar100": (
        CifarForm(False, "cifar-100-binary", ("train.bin",), "test.bin", label_bytes=2),
        CifarForm(True, "cifar-100-python", ("train",), "test", label_bytes=2),
    ),
}


@dataclass(frozen=True, slots=True)
class CifarLabels:
    """A kind of label: its key in the pickles, its byte in the records, and the number of classes."""

    key: str
    position: int
    classes: int


LABELS = {
    "cifar10": {"": CifarLabels("labels", 0, 10)},
    "cifar100": {"coarse": CifarLabels("coarse_labels", 0, 20), "fine": CifarLabels("fine_labels", 1, 100)},
}


def find_form(kind: str, present: Collection[str], where: Path | str) -> CifarForm | None:
    """The published form of a data set whose files are all present; None: none of its files is.

    Args:
        kind: one of `FORMS`.
        present: names of files.
        where: the place, for messages.

    Raises:
        JobError: some files of a form are absent.
    """
    for form in FORMS[kind]:
        missing = [name for name in form.names if name not in present]
        if not missing:
            return form
        if len(missing) < len(form.names):
            raise JobError(f"{where} has no {', '.join(missing)}", remedy="fetch the data set again")
    return None


def labels_of(kind: str, name: str, option: str = "labels") -> CifarLabels:
    """The labels of a name: "" for CIFAR-10, "fine" or "coarse" for CIFAR-100.

    Raises:
        JobError: another name.
    """
    choices = LABELS[kind]
    if name not in choices:
        raise JobError(f"{option} = {name!r} is not known", remedy=f"use one of {', '.join(choices)}")
    return choices[name]


def read_batch(where: Path | str, data: bytes, form: CifarForm, labels: CifarLabels) -> Samples:
    """One file: inputs uint8 (N, 3, 32, 32), targets int64.

    Args:
        where: its name in messages.
        data: its bytes.
        form: its form.
        labels: to read.

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


def _binary(where: Path | str, data: bytes, form: CifarForm, labels: CifarLabels) -> tuple[Array, Array]:
    record = form.label_bytes + PIXELS
    if not data or len(data) % record:
        raise JobError(f"{where} has {len(data)} bytes, not a multiple of {record}", remedy="fetch the data set again")
    rows = np.frombuffer(data, dtype=np.uint8).reshape(-1, record)
    return rows[:, form.label_bytes :], rows[:, labels.position].astype(np.int64)


def pickled_pixels(data: bytes) -> Array:
    """The pixels of a pickled batch, uint8 (N, 3072).

    Raises:
        PickleRefused: it is damaged, asks for more than arrays, or has no array of that kind.
    """
    pixels = _table(data).get("data")
    array = pixels.array if isinstance(pixels, PickledArray) else None
    if array is None or array.dtype != np.uint8 or array.shape[1:] != (PIXELS,):
        raise PickleRefused(f"its 'data' is not an array of uint8 (N, {PIXELS})")
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
        raise JobError(f"{where} is not a pickled CIFAR batch: {one_line(e)}", remedy="fetch the data set again") from None
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
