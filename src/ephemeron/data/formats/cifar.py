"""CIFAR-10 and CIFAR-100 as published (Krizhevsky 2009): binary or pickled batches.

Records of the binary version are 1 label byte (CIFAR-100: coarse, then fine) and 3072 pixel bytes, channel by channel, row by
row. The pickled version is read by `ephemeron.data.formats.cifar`, which executes nothing.

Reads the pickles in which CIFAR's "python version" is published, and runs nothing that they say.

A pickle is a program; NumPy's own classes are enough to do damage (`numpy.ndarray` accepts shapes, buffers and object dtypes). So
no name in the pickle is ever looked up. The five names by which NumPy has written arrays since Python 2 are resolved to the
substitutes below, which take plain values only, check them, and build an array of numbers; every other name is refused. Numbers,
text, lists and dictionaries need no names.
"""

from __future__ import annotations

import io
import math
import pickle
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ephemeron.data.formats.lines import one_line
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


# -- reads the pickles in which CIFAR's "python version" is published ---------------------------------------------


_NUMBERS = re.compile(r"(b1|[iu][1248]|f[248])")


class PickledArray:
    """Substitute for `numpy.ndarray` while the pickle is read; `array` is the result."""

    def __init__(self) -> None:
        self.array: Array | None = None

    def __setstate__(self, state: Any) -> None:
        try:
            _version, shape, dtype, fortran, raw = state
        except (TypeError, ValueError):
            raise PickleRefused("array state is malformed") from None
        self.array = _build(raw, dtype, shape, "F" if fortran else "C")


class _PickledDtype:
    """Substitute for `numpy.dtype`: a kind, a size and a byte order, of numbers only."""

    def __init__(self, name: Any = None, *_flags: Any) -> None:
        text = _text(name)
        if _NUMBERS.fullmatch(text) is None:
            raise PickleRefused(f"dtype {text!r} is not one of numbers")
        self.name = text
        self.order = "="

    def __setstate__(self, state: Any) -> None:
        order = _text(state[1]) if isinstance(state, tuple) and len(state) > 1 else ""
        if order not in ("<", ">", "|", "="):
            raise PickleRefused(f"byte order {order!r} is unknown")
        self.order = order

    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.order + self.name)


def load_plain(data: bytes) -> Any:
    """The value of a pickle of plain containers and arrays of numbers.

    Text of Python 2 comes as bytes. Arrays come as `PickledArray`.

    Raises:
        Refused: the pickle is damaged or names anything else.
    """
    try:
        return _Plain(io.BytesIO(data), encoding="bytes").load()
    except PickleRefused:
        raise
    except Exception as e:  # noqa: BLE001 - damaged pickles raise nearly any error
        raise PickleRefused(f"{type(e).__name__}: {e}") from None


class _Plain(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if stand_in := _STAND_INS.get((module.replace("numpy._core", "numpy.core"), name)):
            return stand_in
        raise PickleRefused(f"it asks for {module}.{name}")


def _ndarray(*_arguments: Any) -> None:
    """Substitute for the class `numpy.ndarray`, which is only named, never called."""
    raise PickleRefused("it calls numpy.ndarray")


def _reconstruct(*_arguments: Any) -> PickledArray:
    return PickledArray()


def _from_buffer(raw: Any, dtype: Any, shape: Any, order: Any, *_axes: Any) -> PickledArray:
    if any(axes is not None for axes in _axes):
        raise PickleRefused("its axes are permuted")
    result = PickledArray()
    result.array = _build(raw, dtype, shape, _text(order))
    return result


def _encode(text: Any, encoding: Any) -> bytes:
    """Substitute for `_codecs.encode`, by which Python 3 writes bytes into pickles for Python 2."""
    if not isinstance(text, str) or _text(encoding) != "latin1":
        raise PickleRefused("it calls _codecs.encode on something other than latin1 text")
    return text.encode("latin1")


def _build(raw: Any, dtype: Any, shape: Any, order: str) -> Array:
    if not isinstance(dtype, _PickledDtype) or not isinstance(raw, (bytes, bytearray)):
        raise PickleRefused("array is not made of raw numbers")
    if not isinstance(shape, tuple) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise PickleRefused(f"array has shape {shape!r}")
    if order not in ("C", "F"):
        raise PickleRefused(f"array has memory order {order!r}")
    values = dtype.dtype()
    if math.prod(shape) * values.itemsize != len(raw):
        raise PickleRefused(f"array of shape {shape} and dtype {values} has {len(raw)} bytes")
    return np.frombuffer(raw, dtype=values).reshape(shape, order="F" if order == "F" else "C")


def _text(value: Any) -> str:
    return value.decode("latin1") if isinstance(value, bytes) else str(value)


_STAND_INS: dict[tuple[str, str], Callable[..., Any]] = {
    ("numpy.core.multiarray", "_reconstruct"): _reconstruct,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    ("numpy", "ndarray"): _ndarray,
    ("numpy", "dtype"): _PickledDtype,
    ("_codecs", "encode"): _encode,
}
