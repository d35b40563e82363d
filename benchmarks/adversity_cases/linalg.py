"""Matrices: names that are used again, missing rank, NaN, damaged tiles, shapes of vectors, and what is left behind."""

from __future__ import annotations

import atexit
import contextlib
import gc
import tempfile
import uuid
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.linalg import LinAlgWarning

from benchmarks.adversity_cases import case
from ephemeron import FunctionExecutor, linalg
from ephemeron.errors import EphemeronError, NotFinite, SingularMatrix
from ephemeron.linalg import BigMatrix
from ephemeron.linalg.matrices import lifetimes
from ephemeron.linalg.statistics import mean, std
from ephemeron.linalg.statistics import sum as total

_NAMES, _FINITE = "an older matrix's result", "rank and NaN"
_OLD, _NEW = np.diag([1.0, 4, 9, 16]), np.diag([25.0, 36, 49, 64])
_ONES = np.ones((4, 1))


@cache
def _pool() -> FunctionExecutor:
    stack = contextlib.ExitStack()
    atexit.register(stack.close)
    return stack.enter_context(FunctionExecutor("simulated", progress=False, max_workers=1))


def _error(compute: Callable[[], Any]) -> EphemeronError | None:
    """What it raises; None: nothing."""
    try:
        compute()
    except EphemeronError as error:
        return error
    return None


def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="adversity-linalg-"))


def _stored(a: np.ndarray, tile: Any = 2, **options: Any) -> BigMatrix:
    return BigMatrix.from_numpy(a, tile=tile, **({"store": _folder().as_uri()} | options))


def _array(found: Any) -> np.ndarray:
    found = found[-1] if isinstance(found, tuple) else found
    return found.to_numpy() if hasattr(found, "to_numpy") else np.asarray(found)


OPERATIONS: dict[str, tuple[Callable[..., Any], Callable[[np.ndarray], Any]]] = {
    "cholesky": (linalg.cholesky, np.linalg.cholesky),
    "lu": (linalg.lu, lambda a: a),
    "qr": (lambda a, **o: abs(_array(linalg.qr(a, **o))), lambda a: a),
    "eigvalsh": (linalg.eigvalsh, np.linalg.eigvalsh),
    "svdvals": (linalg.svdvals, lambda a: np.linalg.svd(a)[1]),
    "matmul": (lambda a, **o: linalg.matmul(a, a, **o), lambda a: a @ a),
    "sum of matrices": (lambda a, **o: (a + a).compute(**o), lambda a: a + a),
    "solve": (lambda a, **o: linalg.solve(a, _ONES, **o), lambda a: np.linalg.solve(a, _ONES)),
    "lstsq": (lambda a, **o: linalg.lstsq(a, _ONES, **o), lambda a: np.linalg.solve(a, _ONES)),
    "inv": (linalg.inv, np.linalg.inv),
    "norm": (linalg.norm, np.linalg.norm),
    "mean": (lambda a, **o: mean(a, 0, **o), lambda a: a.mean(0)),
}


def _named_again(name: str) -> None:
    operation, expected = OPERATIONS[name]
    store = _folder().as_uri()
    for values in (_OLD, _NEW):
        a = _stored(values, store=store, name="m")
        np.testing.assert_allclose(_array(operation(a, executor=_pool())), expected(values), atol=1e-10)
        a.delete()


def _not_finite(name: str, value: float) -> None:
    a = np.eye(4) * 3 + 1
    a[3, 2] = a[2, 3] = value
    error = _error(lambda: OPERATIONS[name][0](_stored(a), executor=_pool()))
    assert isinstance(error, NotFinite), error
    assert f"of A is {value}" in str(error), error
    assert "2, 3" in str(error) or "3, 2" in str(error), error


for _name in OPERATIONS:
    case(_NAMES, f"{_name} of a name that is used again")(partial(_named_again, _name))
for _name in ("cholesky", "lu", "qr", "eigvalsh", "svdvals", "solve", "lstsq", "inv", "norm"):
    for _value in (np.nan, np.inf):
        case(_FINITE, f"{_name} of {_value}")(partial(_not_finite, _name, _value))


def _least_squares(a: np.ndarray) -> None:
    b = np.random.default_rng(1).standard_normal((len(a), 1))
    expected, _, rank, _ = np.linalg.lstsq(a, b, rcond=None)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = linalg.lstsq(_stored(a, (8, a.shape[1])), b, executor=_pool()).to_numpy()
    np.testing.assert_allclose(found, expected, atol=1e-9 * max(1, abs(expected).max()))
    assert len(told) == int(rank < a.shape[1]), told


_HALF = np.random.default_rng(0).standard_normal((16, 3))
for _name, _matrix in {
    "columns twice": np.hstack([_HALF, _HALF]),
    "dummy variables": np.hstack([np.ones((16, 1)), np.eye(4)[np.arange(16) % 4]]),
    "zeros": np.zeros((16, 3)),
    "full rank": _HALF,
    "a column of zeros": np.hstack([_HALF, np.zeros((16, 1))]),
    "tiny values": np.hstack([_HALF, _HALF]) * 1e-290,
    "huge values": np.hstack([_HALF, _HALF]) * 1e150,
}.items():
    case(_FINITE, f"least squares: {_name}")(partial(_least_squares, _matrix))


@case(_FINITE, "solve and inv of a nearly singular matrix")
def _nearly_singular() -> None:
    a = np.random.default_rng(2).standard_normal((8, 8))
    a[:, 7] = a[:, :7].sum(1)
    for compute in (lambda m: linalg.solve(m, np.ones((8, 1)), executor=_pool()), lambda m: linalg.inv(m, executor=_pool())):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            error = _error(partial(compute, _stored(a, 4)))
        assert isinstance(error, SingularMatrix) or [w.category for w in told] == [LinAlgWarning], (error, told)


@case(_FINITE, "denormal matrices")
def _denormal() -> None:
    a = (np.random.default_rng(3).standard_normal((8, 8)) + 8 * np.eye(8)) * 2.0**-1030
    x = linalg.solve(_stored(a, 4), a @ np.ones((8, 1)), check=False, executor=_pool()).to_numpy()
    np.testing.assert_allclose(x, 1, atol=1e-9)


def _damage(key: str, how: str) -> None:
    folder = _folder()
    a = _stored(_OLD, store=folder.as_uri(), name="m")
    [path] = folder.glob(f"m/{key}")
    data = bytearray(path.read_bytes())
    if how == "lost":
        path.unlink()
    else:
        data[len(data) // 2] ^= 1
        path.write_bytes(data if how == "flipped" else data[: len(data) // 2])
    for read in (lambda: BigMatrix.open(folder.as_uri(), "m").to_numpy(), lambda: linalg.cholesky(a, executor=_pool())):
        error = _error(read)
        if key == "matrix.json":  # says that the matrix is whole, and is read where it is opened
            assert error is None or "m" in str(error), error
            continue
        assert error is not None, "a damaged tile was read"
        assert "0.0" in str(error) or "0, 0" in str(error), error
        assert how == "lost" or "damaged" in str(error), error
    a.delete()
    assert not [p for p in folder.rglob("*") if p.is_file() and p.parent.name == "m"]


for _key in ("*.0.0", "matrix.json"):
    for _how in ("flipped", "truncated", "lost"):
        case("damaged objects", f"linalg: {_how} {_key}")(partial(_damage, _key, _how))


def _equal(write: Callable[[Any, Any], Any]) -> None:
    a, v = np.random.default_rng(4).standard_normal((6, 6)), np.arange(6.0)
    found, expected = write(_stored(a, 4), v).compute(executor=_pool()).to_numpy(), write(a, v)
    assert found.shape == expected.shape
    np.testing.assert_allclose(found, expected, atol=1e-12)


_EXPRESSIONS: dict[str, Callable[[Any, Any], Any]] = {
    "A @ v": lambda a, v: a @ v,
    "v @ A": lambda a, v: v @ a,
    "A @ (A @ v)": lambda a, v: a @ (a @ v),
    "v - A @ v": lambda a, v: v - a @ v,
    "A - v": lambda a, v: a - v,
    "v - A": lambda a, v: v - a,
    "A + 1": lambda a, v: a + 1,
    "A - column": lambda a, v: a - v[:, None],
}
for _text, _write in _EXPRESSIONS.items():
    case("NumPy's shapes", _text)(partial(_equal, _write))


@case("NumPy's shapes", "sum, mean and std along each axis")
def _statistics() -> None:
    a = np.random.default_rng(5).standard_normal((7, 5)) + 1e6
    for axis in (None, 0, 1):
        for ours, numpys in ((total, np.sum), (mean, np.mean), (std, np.std)):
            found, expected = ours(_stored(a, 4), axis, executor=_pool()), numpys(a, axis=axis)
            assert np.shape(found) == np.shape(expected)
            np.testing.assert_allclose(found, expected, rtol=1e-9)


@case("what is left behind", "matrices without a name, and results")
def _left() -> None:
    folder = _folder()
    for _ in range(3):
        linalg.matmul(_stored(_OLD, store=folder.as_uri()), _NEW, executor=_pool())
    kept = _stored(_OLD, store=folder.as_uri(), name=f"kept-{uuid.uuid4().hex[:4]}")
    gc.collect()
    lifetimes.settle()
    assert {p.parent.name for p in folder.rglob("*") if p.is_file()} == {kept.stored.name}
