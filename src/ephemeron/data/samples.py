"""Samples in memory, and their encoding as bytes.

A function receives its share of the training set once, as one object in a store, and holds it until it ends. So a data set is two
arrays; the model interprets the numbers.

The format is safetensors: a JSON header and the raw arrays. It is no pickle, so reading it executes nothing; and it needs no copy on
either side: `encode` returns views of the arrays, `decode` makes arrays that are views of the buffer. The safetensors package itself
copies each way (600 MB more of a function's quota for CIFAR-10), which is why the 60 lines are here. Tests compare both directions
with it.

Inputs of several columns are one structured array, with a field for each; in a batch they are a mapping. In the format they are bytes
[samples, bytes of a sample], and the fields are in its metadata.

Limitation: every function holds its whole share in memory.
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from ephemeron.errors import CorruptMessage, JobError

Array: TypeAlias = npt.NDArray[Any]
Buffer: TypeAlias = bytes | bytearray | memoryview

_FORMAT_OF = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
}
_DTYPE_OF = {code: np.dtype(name).newbyteorder("<") for name, code in _FORMAT_OF.items()}
_ALIGNMENT = 8
_FIELDS = "inputs.fields"
"""Key of the metadata: `numpy.dtype.descr` as JSON."""


@dataclass(frozen=True, slots=True, eq=False)
class Samples:
    """Inputs and their targets, position by position.

    Raises:
        JobError: the two have different lengths, one has no axis, or one holds something other than numbers.
    """

    inputs: Array
    """Shape (N, …): the first axis is the sample. Of a structured dtype, the fields are arguments by name."""
    targets: Array
    """Shape (N,) or (N, …)."""

    def __post_init__(self) -> None:
        for name, array in (("inputs", self.inputs), ("targets", self.targets)):
            if array.ndim == 0:
                raise JobError(f"{name} are a single value of dtype {array.dtype}", remedy="the first axis is the sample")
            fields = [dtype.base for dtype in fields_of(array.dtype).values()] or [array.dtype]
            if any(dtype.name not in _FORMAT_OF for dtype in fields):
                raise JobError(f"{name} have dtype {array.dtype}, which is not known", remedy=f"use one of {', '.join(_FORMAT_OF)}")
        if len(self.inputs) != len(self.targets):
            raise JobError(f"there are {len(self.inputs)} inputs but {len(self.targets)} targets", remedy="give one target for each input")

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def nbytes(self) -> int:
        """Size of both arrays in bytes."""
        return self.inputs.nbytes + self.targets.nbytes

    def take(self, indices: npt.ArrayLike) -> Samples:
        """A copy of the samples at these positions, in this order."""
        where = np.asarray(indices, dtype=np.intp)
        return Samples(self.inputs[where], self.targets[where])


def fields_of(dtype: np.dtype[Any]) -> dict[str, np.dtype[Any]]:
    """The fields of a structured dtype; of another one: none."""
    return {} if dtype.fields is None else {name: dtype.fields[name][0] for name in dtype.names or ()}


@dataclass(frozen=True, slots=True, eq=False)
class DataSets:
    """Training and test samples of a source."""

    train: Samples
    test: Samples
    """May be empty; then it has the shapes of `train` and length 0."""


def encode(samples: Samples) -> list[Buffer]:
    """The samples in safetensors format, as buffers to be written one after the other.

    All but the first are views: do not change the arrays before they are written.
    """
    arrays = {"inputs": _plain(samples.inputs), "targets": _plain(samples.targets)}
    header: dict[str, object] = {}
    if arrays["inputs"].dtype.names:
        structured = arrays["inputs"]
        header["__metadata__"] = {_FIELDS: json.dumps(structured.dtype.descr)}
        arrays["inputs"] = structured.view(np.uint8).reshape(*structured.shape, structured.dtype.itemsize)
    arrays = dict(sorted(arrays.items(), key=lambda item: -item[1].dtype.itemsize))  # keeps every array aligned
    start = 0
    for name, array in arrays.items():
        code = _FORMAT_OF[array.dtype.name]
        header[name] = {"dtype": code, "shape": array.shape, "data_offsets": (start, start + array.nbytes)}
        start += array.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    return [struct.pack("<Q", len(text)) + text, *(_bytes_of(array) for array in arrays.values())]


def decode(buffer: Buffer) -> Samples:
    """Samples whose arrays are views of the buffer: read-only where the buffer is.

    Raises:
        CorruptMessage: the buffer is no safetensors file, is truncated, or lacks `inputs` or `targets`.
    """
    view = memoryview(buffer).cast("B")
    header, data = _header(view)
    arrays = {}
    for name in ("inputs", "targets"):
        if name not in header:
            raise CorruptMessage(f"safetensors header has no {name!r}, only {sorted(header)}")
        arrays[name] = _array(name, header[name], data)
    about = header.get("__metadata__")
    if isinstance(about, dict) and _FIELDS in about:
        arrays["inputs"] = _structured(arrays["inputs"], about[_FIELDS])
    try:
        return Samples(**arrays)
    except JobError as e:
        raise CorruptMessage(f"the bytes are not samples: {e}") from None


def _plain(array: Array) -> Array:
    """The array in C order, little endian; not copied if it is so already."""
    return np.ascontiguousarray(array, dtype=array.dtype.newbyteorder("<"))


def _bytes_of(array: Array) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


def _header(view: memoryview) -> tuple[dict[str, object], memoryview]:
    if len(view) < 8:
        raise CorruptMessage(f"{len(view)} bytes are too few for a safetensors header")
    (length,) = struct.unpack_from("<Q", view)
    if length > len(view) - 8:
        raise CorruptMessage(f"safetensors header of {length} bytes in a buffer of {len(view)} bytes")
    try:
        header = json.loads(bytes(view[8 : 8 + length]))
    except (ValueError, RecursionError) as e:
        raise CorruptMessage(f"safetensors header is not JSON: {e}") from None
    if not isinstance(header, dict):
        raise CorruptMessage("safetensors header is not a table")
    return header, view[8 + length :]


def _array(name: str, entry: Any, data: memoryview) -> Array:
    try:
        dtype, shape = _DTYPE_OF[entry["dtype"]], tuple(entry["shape"])
        start, stop = entry["data_offsets"]
    except (KeyError, TypeError, ValueError):
        raise CorruptMessage(f"safetensors entry for {name!r} is malformed: {entry!r}") from None
    if not all(isinstance(n, int) and n >= 0 for n in (*shape, start, stop)):
        raise CorruptMessage(f"safetensors entry for {name!r} is malformed: {entry!r}")
    size = math.prod(shape) * dtype.itemsize
    if stop - start != size or stop > len(data):
        raise CorruptMessage(f"{name!r} of {size} bytes is not at {start}:{stop} of {len(data)} bytes")
    array = np.frombuffer(data[start:stop], dtype=dtype).reshape(shape)
    return array.astype(dtype.newbyteorder("="), copy=False)


def _structured(array: Array, fields: str) -> Array:
    """Bytes of samples as an array with fields."""
    try:
        dtype = np.dtype([(name, kind, *map(tuple, shape)) for name, kind, *shape in json.loads(fields)])
        return array.view(dtype).reshape(array.shape[:-1])
    except (TypeError, ValueError, KeyError) as e:
        raise CorruptMessage(f"the fields {fields[:200]} of inputs are not those of {array.dtype} {array.shape}: {e}") from None
