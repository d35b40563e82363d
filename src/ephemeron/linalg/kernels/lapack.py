"""BLAS and LAPACK without Python's interpreter lock.

SciPy's functions of the same names hold the lock from start to end. A function that computes fetches the tiles of its next task, stores those of
its last one and renews its leases meanwhile, so kernels call the same library with the pointers that SciPy gives to Cython. (NumPy's `matmul`
and `linalg` let go of the lock themselves.)

Reflectors (V, T) come and go in Fortran order, as LAPACK has them; what works with products, which NumPy makes in C order, takes a matrix in C
order for its transpose in Fortran order, so that neither is rearranged.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from scipy.linalg import cython_blas, cython_lapack

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
            given.append(ctypes.c_char_p(argument))
        else:
            given.append(argument.ctypes.data_as(ctypes.c_void_p))
    _routine(library, name, len(given))(*(ctypes.cast(g, ctypes.c_void_p) for g in given))


@cache
def _routine(library: Any, name: str, arguments: int) -> Callable[..., None]:
    name_of, pointer_of = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    name_of.restype, name_of.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer_of.restype, pointer_of.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    capsule = library.__pyx_capi__[name]
    return ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * arguments)(pointer_of(capsule, name_of(capsule)))


# -- C order


def triangular_solution(
    t: Array, b: Array, *, right: bool = False, lower: bool = True, adjoint: bool = False, unit: bool = False
) -> Array:
    """X with op(t) X = b, or X op(t) = b (BLAS trsm).

    Args:
        t: its triangle (n × n) is read.
        b: right-hand sides.
        right: X is at the left of op(t).
        lower: the lower triangle, not the upper one.
        adjoint: op is the adjoint, not nothing.
        unit: the diagonal is ones.
    """  # fmt: skip
    dtype = np.result_type(t, b)
    of, x = _seen(t.T, dtype), _copied(b.T, dtype)
    m, n = x.shape
    blas(
        "trsm", dtype, b"L" if right else b"R", b"U" if lower else b"L", b"C" if adjoint else b"N", b"U" if unit else b"N", m, n,
        np.ones(1, dtype), of, _leading(of), x, _leading(x),
    )  # fmt: skip
    return x.T


def cholesky_triangle(a: Array) -> tuple[Array, int]:
    """Lower L with L Lᴴ = a, from the lower triangle of `a` (n × n), and LAPACK's `info` (potrf)."""
    x = _copied(a.T, a.dtype)
    info = lapack("potrf", x.dtype, b"U", len(x), x, _leading(x))
    return np.tril(x.T), info


def rank_k_difference(c: Array, a: Array) -> Array:
    """`c - a aᴴ` in the lower triangle, `c` above it (BLAS syrk, herk). `c` is n × n and Hermitian, `a` is n × k."""
    dtype = np.result_type(c, a)
    of, x = _seen(a.T, dtype), _copied(c.T, dtype)
    is_complex, real = dtype.kind == "c", np.dtype(dtype.char.lower())
    k, n = of.shape
    blas(
        "herk" if is_complex else "syrk", dtype, b"U", b"C" if is_complex else b"T", n, k, np.full(1, -1.0, real), of, _leading(of),
        np.ones(1, real), x, _leading(x),
    )  # fmt: skip
    return x.T


def row_factors(a: Array) -> tuple[Array, Array, int]:
    """L and U in one matrix, the row that was exchanged with each, from 0, and LAPACK's `info` (getrf) of `a` (m × n)."""
    x, swaps = _copied(a, a.dtype), np.zeros(min(a.shape), np.intc)
    info = lapack("getrf", x.dtype, *x.shape, x, _leading(x), swaps)
    return x, swaps - 1, info


# -- Reflectors, in Fortran order


def reflectors(a: Array, block: int) -> tuple[Array, Array]:
    """V below R, and T (`block` × min(m, n)) of `a` (m × n) (LAPACK geqrt)."""
    x, (m, n) = _copied(a, a.dtype), a.shape
    t = np.zeros((block, min(m, n)), x.dtype, order="F")
    lapack("geqrt", x.dtype, m, n, block, x, _leading(x), t, _leading(t), np.zeros(block * n, x.dtype))
    return x, t


def reflected(v: Array, t: Array, c: Array, *, right: bool = False, adjoint: bool = False) -> Array:
    """`op(Q) c`, or `c op(Q)`, with Q of `reflectors` (LAPACK gemqrt)."""
    dtype = np.result_type(v, c)
    v, t, x = _seen(v, dtype), _seen(t, dtype), _copied(c, dtype)
    (m, n), (block, k) = x.shape, t.shape
    lapack(
        "gemqrt", dtype, b"R" if right else b"L", _mode(dtype, adjoint), m, n, k, block, v, _leading(v), t, _leading(t), x, _leading(x),
        np.zeros(block * (m if right else n), dtype),
    )  # fmt: skip
    return x


def pair_reflectors(r: Array, s: Array, *, trapezoid: int, block: int) -> tuple[Array, Array, Array]:
    """R, V (m × n) and T (`block` × n) of the upper triangle `r` (n × n) above `s` (m × n) (LAPACK tpqrt).

    Args:
        r, s: the matrices.
        trapezoid: last rows of `s` that are upper trapezoidal; 0: `s` is full.
        block: rows of T.
    """
    dtype = np.result_type(r, s)
    top, v, (m, n) = _copied(r, dtype), _copied(s, dtype), s.shape
    t = np.zeros((block, n), dtype, order="F")
    work = np.zeros(block * n, dtype)
    lapack("tpqrt", dtype, m, n, trapezoid, block, top, _leading(top), v, _leading(v), t, _leading(t), work)
    return top, v, t


def pair_reflected(
    v: Array, t: Array, c: Array, d: Array, *, trapezoid: int, right: bool = False, adjoint: bool = False
) -> tuple[Array, Array]:
    """`op(Q)` of `pair_reflectors` applied to `c` above `d`, or `c` beside `d` times `op(Q)` (LAPACK tpmqrt)."""
    dtype = np.result_type(v, c, d)
    v, t, first, second = _seen(v, dtype), _seen(t, dtype), _copied(c, dtype), _copied(d, dtype)
    (m, n), (block, k) = second.shape, t.shape
    lapack(
        "tpmqrt", dtype, b"R" if right else b"L", _mode(dtype, adjoint), m, n, k, trapezoid, block, v, _leading(v), t, _leading(t), first,
        _leading(first), second, _leading(second), np.zeros(block * (m if right else n), dtype),
    )  # fmt: skip
    return first, second


def _mode(dtype: np.dtype[Any], adjoint: bool) -> bytes:
    return b"N" if not adjoint else b"C" if dtype.kind == "c" else b"T"


def _copied(a: Array, dtype: np.dtype[Any]) -> Array:
    return np.array(a, dtype, order="F")


def _seen(a: Array, dtype: np.dtype[Any]) -> Array:
    return np.asarray(a, dtype, order="F")


def _leading(a: Array) -> int:
    """LAPACK's leading dimension."""
    return max(1, len(a))
