"""Every object of matrices damaged, cut short, replaced or removed once: the right result, or an error that names the key."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from ephemeron import FunctionExecutor, linalg
from ephemeron.errors import EphemeronError
from ephemeron.linalg import BigMatrix
from ephemeron.testing.damage import DAMAGES, Damage

VALUES = np.diag(np.arange(1.0, 7.0)) + 0.1


@pytest.fixture(scope="module")
def pool():
    with FunctionExecutor("simulated", progress=False, max_workers=2, retries=0) as executor:
        yield executor


def damaged(path: Path, damage: Damage) -> None:
    """Damages a stored object."""
    others = {other.name: other.read_bytes() for other in path.parent.iterdir()}
    found = damage(path.name, path.read_bytes(), others)
    path.unlink()
    if found is not None:
        path.write_bytes(found)


def key_of(path: Path) -> str:
    return path.name.replace("+", "/")


@pytest.mark.parametrize("damage", DAMAGES)
def test_an_input_is_named(pool, tmp_path: Path, damage: Damage) -> None:
    a = BigMatrix.from_numpy(VALUES, tile=3, store=tmp_path.as_uri(), name="a")
    for path in sorted(path for path in tmp_path.rglob("*") if path.is_file()):
        whole = path.read_bytes()
        damaged(path, damage)
        try:
            found = linalg.cholesky(a, executor=pool).to_numpy()
        except EphemeronError as e:
            assert key_of(path) in str(e), (path, str(e))  # noqa: PT017 - either is right
        else:
            np.testing.assert_allclose(found, np.linalg.cholesky(VALUES))
        path.write_bytes(whole)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_result_is_named(pool, tmp_path: Path, damage: Damage) -> None:
    a = BigMatrix.from_numpy(VALUES, tile=3, store=tmp_path.as_uri(), name="a")
    found = linalg.cholesky(a, executor=pool)
    inputs = {path for path in tmp_path.rglob("*") if path.is_file() and path.parent.name == "a"}
    results = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path not in inputs)
    assert len(results) >= 3
    for path in results:
        whole = path.read_bytes()
        damaged(path, damage)
        try:
            read = found.to_numpy()
        except EphemeronError as e:
            assert key_of(path) in str(e) or f"no tile {path.name.replace('.', ', ')} of" in str(e), (path, str(e))  # noqa: PT017 - either is right
        else:
            np.testing.assert_allclose(read, np.linalg.cholesky(VALUES))
        path.write_bytes(whole)
