"""Results and tiles in functions' memory belong to values, not to names: what is stored under a name again is another matrix."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ephemeron import FunctionExecutor, linalg
from ephemeron.errors import JobError
from ephemeron.linalg import BigMatrix

OLD, NEW = np.diag([1.0, 4, 9, 16]), np.diag([25.0, 36, 49, 64])
SIDES = np.arange(1.0, 5)[:, None]
Operation = Callable[..., Any]


def array(found: Any) -> np.ndarray:
    return found.to_numpy() if isinstance(found, BigMatrix) else np.asarray(found)


OPERATIONS: dict[str, tuple[Operation, Callable[[np.ndarray], np.ndarray]]] = {
    "cholesky": (lambda a, p: linalg.cholesky(a, executor=p), np.linalg.cholesky),
    "lu": (lambda a, p: linalg.lu(a, executor=p)[2], lambda a: a),
    "qr": (lambda a, p: abs(array(linalg.qr(a, executor=p)[1])), lambda a: a),
    "eigh": (lambda a, p: linalg.eigh(a, executor=p)[0], np.linalg.eigvalsh),
    "eigvalsh": (lambda a, p: linalg.eigvalsh(a, executor=p), np.linalg.eigvalsh),
    "svd": (lambda a, p: linalg.svd(a, executor=p)[1], lambda a: np.linalg.svd(a)[1]),
    "svdvals": (lambda a, p: linalg.svdvals(a, executor=p), lambda a: np.linalg.svd(a)[1]),
    "randomized_svd": (lambda a, p: linalg.randomized_svd(a, 4, executor=p)[1], lambda a: np.linalg.svd(a)[1]),
    "matmul": (lambda a, p: linalg.matmul(a, a, executor=p), lambda a: a @ a),
    "sum": (lambda a, p: (a + a).compute(executor=p), lambda a: a + a),
    "part": (lambda a, p: a[1:4, :].compute(executor=p), lambda a: a[1:4]),
    "solve": (lambda a, p: linalg.solve(a, SIDES, executor=p), lambda a: np.linalg.solve(a, SIDES)),
    "lstsq": (lambda a, p: linalg.lstsq(a, SIDES, executor=p), lambda a: np.linalg.solve(a, SIDES)),
    "inv": (lambda a, p: linalg.inv(a, executor=p), np.linalg.inv),
    "norm": (lambda a, p: linalg.norm(a, executor=p), lambda a: np.asarray(np.linalg.norm(a))),
}


@pytest.fixture(scope="module")
def pool():
    with FunctionExecutor("simulated", progress=False, max_workers=1) as executor:
        yield executor


@pytest.mark.parametrize(
    "name", [each if each in ("cholesky", "norm") else pytest.param(each, marks=pytest.mark.slow) for each in OPERATIONS]
)
def test_a_matrix_that_is_stored_again_is_another_one(pool, tmp_path, name):
    operation, expected = OPERATIONS[name]
    store = tmp_path.as_uri()
    old = BigMatrix.from_numpy(OLD, tile=2, store=store, name="m")
    np.testing.assert_allclose(array(operation(old, pool)), expected(OLD), atol=1e-12)
    old.delete()
    new = BigMatrix.from_numpy(NEW, tile=2, store=store, name="m")
    np.testing.assert_allclose(array(operation(new, pool)), expected(NEW), atol=1e-11)
    np.testing.assert_array_equal(new.to_numpy(), NEW)


def test_whole_results_of_the_same_values_are_kept(pool, tmp_path):
    a = BigMatrix.from_numpy(OLD, tile=2, store=tmp_path.as_uri(), name="m")
    first = linalg.cholesky(a, executor=pool)
    assert first.report.tasks == 4
    again = linalg.cholesky(BigMatrix.open(tmp_path.as_uri(), "m"), executor=pool)
    assert again.report.tasks == 0
    np.testing.assert_array_equal(again.to_numpy(), np.linalg.cholesky(OLD))


def test_the_handle_of_a_matrix_that_was_replaced_neither_reads_nor_deletes_the_new_one(tmp_path):
    old = BigMatrix.from_numpy(OLD, tile=2, store=tmp_path.as_uri(), name="m")
    BigMatrix.open(tmp_path.as_uri(), "m").delete()
    new = BigMatrix.from_numpy(NEW, tile=2, store=tmp_path.as_uri(), name="m")
    with pytest.raises(JobError, match=r"no tile ., . of 'm'"):
        old.to_numpy()
    old.delete()
    np.testing.assert_array_equal(BigMatrix.open(tmp_path.as_uri(), "m").to_numpy(), NEW)
    new.delete()
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


def test_a_matrix_that_could_not_be_written_leaves_nothing(tmp_path):
    def values(rows: slice, columns: slice) -> np.ndarray:
        if rows.start:
            raise ValueError("the source is broken")
        return OLD[rows, columns]

    with pytest.raises(ValueError, match="broken"):
        BigMatrix.from_function(values, (4, 4), tile=2, store=tmp_path.as_uri(), name="m")
    assert not [path for path in tmp_path.rglob("*") if path.is_file()]


PROCESS = textwrap.dedent("""
    import sys
    import numpy as np
    from ephemeron import FunctionExecutor
    from ephemeron.linalg import BigMatrix, cholesky

    store, first = sys.argv[1], float(sys.argv[2])
    a = BigMatrix.from_numpy(np.diag([first, 4 * first]), tile=1, store=store, name="m")
    with FunctionExecutor("simulated", progress=False) as pool:
        print(cholesky(a, executor=pool).to_numpy().diagonal().tolist())
    a.delete()
""")


@pytest.mark.slow
def test_another_process_stores_other_values_under_the_name(tmp_path: Path):
    def run(first: float) -> str:
        done = subprocess.run([sys.executable, "-c", PROCESS, tmp_path.as_uri(), str(first)], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    assert [run(1.0), run(4.0)] == ["[1.0, 2.0]", "[2.0, 4.0]"]
