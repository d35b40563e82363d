"""Reads the pickles in which CIFAR's "python version" is published, and runs nothing that they say.

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
from collections.abc import Callable
from typing import Any

import numpy as np

from ephemeron.data.samples import Array
from ephemeron.errors import PickleRefused

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
