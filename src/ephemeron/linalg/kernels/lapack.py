"""BLAS and LAPACK without Python's interpreter lock.

SciPy's functions of the same names hold the lock from start to end. A function that computes fetches the tiles of its next task, stores those of
its last one and renews its leases meanwhile, so kernels call the same library with the pointers that SciPy gives to Cython. (NumPy's `matmul`
and `linalg` let go of the lock themselves.)

Matrices are in Fortran order, whole or parts of such a matrix, and are changed in place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np

from ephemeron.errors import MissingExtra

try:
    from scipy.linalg import LinAlgWarning as LinAlgWarning
    from scipy.linalg import cython_blas, cython_lapack
except ModuleNotFoundError as _error:
    if (_error.name or "").partition(".")[0] != "scipy":
        raise
    raise MissingExtra("scipy", "linalg") from None

Array = np.ndarray[Any, np.dtype[Any]]
Argument = bytes | int | Array
_PREFIX = {"f": "s", "d": "d", "F": "c", "D": "z"}


def lapack(name: str, dtype: np.dtype[Any], *arguments: Argument) -> int:
    """Calls a LAPACK routine, and returns its `info`.

    Args:
        name: without the prefix of the type.
        dtype: float32, float64, complex64 or complex128.
        arguments: those before `info`; arrays are overwritten as the routine does.
    """
    info = ctypes.c_int(0)
    _call(cython_lapack, _PREFIX[dtype.char] + name, (*arguments, info))
    assert info.value >= 0, f"argument {-info.value} of {name} is wrong"
    return info.value


def blas(name: str, dtype: np.dtype[Any], *arguments: Argument) -> None:
    """Calls a BLAS routine; arguments as for `lapack`."""
    _call(cython_blas, _PREFIX[dtype.char] + name, arguments)


def _call(library: Any, name: str, arguments: tuple[Any, ...]) -> None:
    given: list[Any] = []
    for argument in arguments:
        if isinstance(argument, int):
            given.append(ctypes.byref(ctypes.c_int(argument)))
        elif isinstance(argument, ctypes.c_int):
            given.append(ctypes.byref(argument))
        elif isinstance(argument, bytes):
            given.append(argument)
        else:
            given.append(argument.ctypes.data)
    _routine(library, name, len(given))(*given)


@cache
def _routine(library: Any, name: str, arguments: int) -> Callable[..., None]:
    name_of, pointer_of = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule = library.__pyx_capi__[name]
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * arguments)(pointer_of(capsule, name_of(capsule)))


def add_product(c: Array, a: Array, b: Array, *, alpha: float = 1.0, beta: float = 1.0, op_a: bytes = b"N", op_b: bytes = b"N") -> None:
    """`c = beta c + alpha op(a) op(b)` (BLAS gemm). The operations are those of BLAS: N, T or C."""
    (m, n), k = c.shape, a.shape[1] if op_a == b"N" else a.shape[0]
    if c.size:
        dtype = c.dtype
        blas(
            "gemm",
            dtype,
            op_a,
            op_b,
            m,
            n,
            k,
            _number(alpha, dtype.char),
            a,
            leading(a),
            b,
            leading(b),
            _number(beta, dtype.char),
            c,
            leading(c),
        )


def multiply_right(x: Array, t: Array, *, op: bytes = b"N") -> None:
    """`x = x op(t)` for an upper triangle t (BLAS trmm)."""
    if x.size:
        m, n = x.shape
        one = _number(1.0, x.dtype.char)
        blas("trmm", x.dtype, b"R", b"U", op, b"N", m, n, one, t, leading(t), x, leading(x))


def solve_right(x: Array, t: Array, *, lower: bool, op: bytes = b"N", unit: bool = False) -> None:
    """`x = x op(t)⁻¹` for a triangle t (BLAS trsm)."""
    if x.size:
        m, n = x.shape
        one = _number(1.0, x.dtype.char)
        triangle, diagonal = b"L" if lower else b"U", b"U" if unit else b"N"
        blas("trsm", x.dtype, b"R", triangle, op, diagonal, m, n, one, t, leading(t), x, leading(x))


def scale_of_tiny(*arrays: Array) -> float:
    """A power of two that makes values of about one of matrices whose values are all so small that their products, or the inverses of their
    values, are beyond the normal numbers; else 1. Multiplying by it is exact."""
    kinds = [np.finfo(a.dtype) for a in arrays if a.size]
    if not kinds:
        return 1.0
    small = max(float(kind.tiny) / float(kind.eps) ** 2 for kind in kinds)
    if any(a.size and abs(a.flat[0]) > small for a in arrays):  # nearly always: no other value is looked at
        return 1.0
    largest = max(float(np.abs(a).max()) for a in arrays if a.size)
    if not 0 < largest < small:
        return 1.0
    most = min(kind.maxexp for kind in kinds) - 24
    return float(2.0 ** min(most, -int(np.frexp(largest)[1])))


def adjoint_of(dtype: np.dtype[Any]) -> bytes:
    """BLAS's letter for the adjoint; some routines know no C for real types."""
    return b"C" if dtype.kind == "c" else b"T"


def fortran(a: Array, dtype: np.dtype[Any]) -> Array:
    """`a` in Fortran order, copied where it is not."""
    return np.asarray(a, dtype, order="F")


def leading(a: Array) -> int:
    """LAPACK's leading dimension of a matrix in Fortran order, or of a part of one."""
    return max(1, len(a), a.strides[1] // a.itemsize if a.shape[1] > 1 else 1)


@cache
def _number(value: float, char: str) -> Array:
    return np.full(1, value, char)
