"""Matrices without a name, and results, go with the last object that refers to them; with their process; or after it was killed."""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ephemeron import FunctionExecutor
from ephemeron.cli.main import main
from ephemeron.errors import NotPositiveDefinite
from ephemeron.linalg import BigMatrix, cholesky, lstsq, lu, matmul, qr, solve
from ephemeron.linalg.execution.remains import remove_matrices, stored_matrices
from ephemeron.linalg.matrices import lifetimes

A = np.diag([1.0, 4, 9, 16])


@pytest.fixture(scope="module")
def pool():
    with FunctionExecutor("simulated", progress=False, max_workers=1) as executor:
        yield executor


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    return tmp_path / "store"


def names(folder: Path) -> set[str]:
    """Of what is there, once nothing is left to remove."""
    gc.collect()
    lifetimes.settle()
    return {path.parent.name for path in folder.rglob("*") if path.is_file()}


def store(folder: Path, **options: object) -> BigMatrix:
    return BigMatrix.from_numpy(A, tile=2, store=folder.as_uri(), **options)  # type: ignore[arg-type]


def test_an_unnamed_matrix_goes_with_its_last_view(folder):
    a = store(folder)
    view = a[2:, :].T
    del a
    assert len(names(folder)) == 1
    np.testing.assert_array_equal(view.to_numpy(), A[2:].T)
    del view
    assert names(folder) == set()


def test_a_named_matrix_stays(folder):
    del_me = store(folder, name="mine")
    del del_me
    assert names(folder) == {"mine"}


def test_a_result_goes_with_its_last_handle(pool, folder):
    a = store(folder, name="mine")
    first, again = cholesky(a, executor=pool), cholesky(a, executor=pool)
    assert again.report.tasks == 0
    del first
    assert names(folder) == {"mine", again.stored.name}
    np.testing.assert_array_equal(again.to_numpy(), np.sqrt(A))
    del again
    assert names(folder) == {"mine"}
    assert cholesky(a, executor=pool).report.tasks == 4, "computed again"


@pytest.mark.parametrize(
    ("name", "made", "other"),
    [
        ("mine", lambda a, pool: cholesky(a, executor=pool), lambda a, pool: solve(a, A[0], assume_a="positive definite", executor=pool)),
        (None, lambda a, pool: lu(a, executor=pool)[2], lambda a, pool: solve(a, A[0], executor=pool)),
        ("mine", lambda a, pool: qr(a, executor=pool)[0], lambda a, pool: lstsq(a, A[0], executor=pool)),
        (None, lambda a, pool: matmul(a, a, executor=pool), lambda a, pool: (a @ a + a).compute(executor=pool)),
        ("mine", lambda a, pool: matmul(a, a, executor=pool).T, lambda a, pool: (a @ a @ a).compute(executor=pool)),
    ],
    ids=["cholesky", "lu", "qr", "step of an expression", "view"],
)
def test_a_result_that_another_operation_needs_on_the_way_stays(pool, folder, name, made, other):
    a = store(folder, name=name)
    result = made(a, pool)
    values = result.to_numpy()
    found = other(a, pool)
    np.testing.assert_array_equal(result.to_numpy(), values)
    assert names(folder) == {a.stored.name, result.stored.name, getattr(found, "column", found).stored.name}
    del result
    assert names(folder) == {a.stored.name, getattr(found, "column", found).stored.name}


def test_a_result_that_is_kept_stays(pool, folder):
    a = store(folder, name="mine")
    name = cholesky(a, executor=pool).keep().stored.name
    del_me = cholesky(a, executor=pool)  # whole already, and kept
    del del_me
    assert names(folder) == {"mine", name}
    found = BigMatrix.open(folder.as_uri(), name)
    np.testing.assert_array_equal(found.to_numpy(), np.sqrt(A))
    found.delete()
    assert names(folder) == {"mine"}


def test_what_a_failed_computation_made_stays_as_long_as_its_input(pool, folder):
    bad = BigMatrix.from_numpy(np.diag([1.0, 2, -1, 1]), tile=2, store=folder.as_uri())
    with pytest.raises(NotPositiveDefinite):
        cholesky(bad, executor=pool)
    assert len(names(folder)) > 1
    del bad
    assert names(folder) == set()


def test_forty_calls_leave_no_more_than_one(pool, folder):
    for _ in range(3):
        a = store(folder)
        product = matmul(a, a, executor=pool)
        np.testing.assert_array_equal(product.to_numpy(), A @ A)
        assert len(names(folder)) == 2
    del a, product
    assert names(folder) == set()


def test_a_copy_by_pickle_keeps_the_tiles(folder):
    a = store(folder)
    copy = pickle.loads(pickle.dumps(a))
    del a
    assert len(names(folder)) == 1
    np.testing.assert_array_equal(copy.to_numpy(), A)


def test_a_matrix_that_was_deleted_is_not_removed_again(folder):
    a = store(folder)
    a.delete()
    b = BigMatrix.stored_as(a.stored, lambda rows, columns: A[rows, columns])
    del a
    assert len(names(folder)) == 1
    np.testing.assert_array_equal(b.to_numpy(), A)


PROCESS = textwrap.dedent("""
    import os, signal, sys
    import numpy as np
    from ephemeron import FunctionExecutor
    from ephemeron.linalg import BigMatrix, matmul

    a = np.eye(4)
    with FunctionExecutor("simulated", progress=False) as pool:
        held = BigMatrix.from_numpy(a, tile=2, store=sys.argv[1])
        made = matmul(held, a, executor=pool)
        named = BigMatrix.from_numpy(a, tile=2, store=sys.argv[1], name="mine")
        of_named = matmul(named, named, executor=pool)
    if os.fork() == 0:
        sys.exit()
    os.wait()
    assert made.to_numpy().tolist() == a.tolist(), "a process that was forked off removes nothing"
    print("stored", flush=True)
    if sys.argv[2] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
""")


@pytest.mark.slow
@pytest.mark.parametrize("end", ["ended", "killed"])
def test_a_process_leaves_what_has_a_name(pool, folder, end):
    done = subprocess.run([sys.executable, "-c", PROCESS, folder.as_uri(), end], capture_output=True, text=True, timeout=300)
    assert "stored" in done.stdout, done.stderr
    if end == "ended":
        assert names(folder) == {"mine"}
        assert list((Path(os.environ["EPHEMERON_HOME"]) / "matrix-owners").glob("*")) == []
        return
    assert done.returncode == -signal.SIGKILL
    found = {each.kind: each for each in stored_matrices(folder.as_uri())}
    assert set(found) == {"named", "result", "unnamed"}
    assert not found["unnamed"].is_owned
    assert found["unnamed"].owner
    assert found["unnamed"].is_abandoned
    assert found["unnamed"].nbytes > 16 * 8
    assert lifetimes.remove_orphans() == 2
    left = stored_matrices(folder.as_uri())
    assert sorted(each.kind for each in left) == ["named", "result"], "another run goes on from the named matrix's result"


def test_the_inventory_of_the_home_folder(pool, folder):
    assert stored_matrices() == []
    mine = BigMatrix.from_numpy(A, tile=2, name="mine")
    unnamed, lower = BigMatrix.from_numpy(A, tile=2), cholesky(mine, executor=pool)
    found = {each.name: each for each in stored_matrices()}
    assert set(found) == {mine.stored.name, unnamed.stored.name, lower.stored.name}
    assert [found[m.stored.name].kind for m in (mine, unnamed, lower)] == ["named", "unnamed", "result"]
    assert all(each.age_s is not None and each.nbytes > 300 and each.objects > 3 for each in found.values())
    assert [found[m.stored.name].owner for m in (mine, unnamed, lower)] == [None, os.getpid(), os.getpid()]
    remove_matrices(found[m.stored.name] for m in (unnamed, lower))
    assert len(stored_matrices()) == 3, "a living process has them"
    remove_matrices([found["mine"]])
    assert {each.name for each in stored_matrices()} == {unnamed.stored.name, lower.stored.name}


def test_the_home_folder_is_cleaned_without_an_address(folder):
    run = CliRunner().invoke
    nothing = run(main, ["linalg", "clean"])
    assert nothing.exit_code == 0, nothing.output
    assert "no program has left anything" in nothing.output
    old = Path(os.environ["EPHEMERON_HOME"]) / "matrices" / "matrix-0123456789abcdef"
    old.mkdir(parents=True)
    (old / "0.0").write_bytes(b"x" * 1000)
    mine = BigMatrix.from_numpy(A, tile=2)
    told = run(main, ["linalg", "clean"], input="y\n")
    assert told.exit_code == 0, told.output
    assert "matrix-0123456789abcdef: unnamed, 1.0 kB" in told.output
    assert "remove what is left of 1 result without an owner?" in told.output
    assert not (old / "0.0").exists()
    np.testing.assert_array_equal(mine.to_numpy(), A)
