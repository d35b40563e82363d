"""Factorisations and equations on local functions against NumPy: real and complex, with ragged tiles at the borders."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from ephemeron import FunctionExecutor, linalg
from ephemeron.cli.main import main
from ephemeron.errors import JobError, NotPositiveDefinite, SingularMatrix

N = 70


@pytest.fixture(scope="module")
def pool():
    with FunctionExecutor("local", progress=False, max_workers=2) as executor:
        yield executor


@pytest.fixture
def stored(tmp_path: Path):
    def store(a, tile=32):
        return linalg.BigMatrix.from_numpy(a, tile=tile, store=(tmp_path / "matrices").as_uri())

    return store


def values(rows, columns, dtype="float64"):
    rng = np.random.default_rng(rows * columns)
    found = rng.standard_normal((rows, columns)).astype(dtype)
    return found + 1j * rng.standard_normal((rows, columns)) if np.iscomplexobj(found) else found


def backward(residual, *operands):
    """Size of a residual beside the operands, in units of rounding and size."""
    scale = np.prod([np.linalg.norm(x) for x in operands])
    eps = np.finfo(residual.dtype).eps
    return np.linalg.norm(residual) / (scale * eps * max(residual.shape))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_factorisations(pool, stored, dtype):
    g = values(N, N, dtype)
    a = g @ g.conj().T + np.eye(N)
    found = linalg.cholesky(stored(a), executor=pool)
    lower = found.to_numpy()
    assert backward(lower @ lower.conj().T - a, a) < 3
    assert not np.triu(lower, 1).any()
    assert found.report.tasks == 10
    p, lower, upper = linalg.lu(stored(g), executor=pool)
    assert sorted(p) == list(range(N))
    assert backward(lower.to_numpy() @ upper.to_numpy() - g[p], lower.to_numpy(), upper.to_numpy()) < 3
    assert abs(np.tril(lower.to_numpy(), -1)).max() < 20, "tournament pivoting bounds growth"
    rectangle = g[:, :40].copy()
    p, lower, upper = linalg.lu(stored(rectangle), executor=pool)
    assert sorted(p) == list(range(N))
    assert backward(lower.to_numpy() @ upper.to_numpy() - rectangle[p], lower.to_numpy(), upper.to_numpy()) < 3
    for a in (g, rectangle, g[:40].copy()):
        q, r = (m.to_numpy() for m in linalg.qr(stored(a), executor=pool))
        assert backward(q @ r - a, a) < 3
        assert backward(q.conj().T @ q - np.eye(len(r)), q) < 3, a.shape
        assert not np.tril(r, -1).any()


@pytest.mark.slow
def test_tall_matrices(pool, stored):
    a = values(90, 12) @ np.diag(10.0 ** -np.arange(12))  # condition 1e11
    u, s, vh = linalg.svd(stored(a, (20, 12)), executor=pool)
    np.testing.assert_allclose(s, np.linalg.svd(a, compute_uv=False), atol=1e-15 * s[0] * 90)
    assert backward(u.to_numpy() * s @ vh.to_numpy() - a, a) < 3
    b = values(90, 3)
    x = linalg.lstsq(stored(a[:, :4].copy(), (20, 4)), stored(b, (20, 3)), executor=pool)
    np.testing.assert_allclose(x.to_numpy(), np.linalg.lstsq(a[:, :4], b, rcond=None)[0], rtol=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("assume_a", ["general", "positive definite"])
def test_equations_with_an_ill_conditioned_matrix(pool, stored, assume_a):
    q = np.linalg.qr(values(N, N))[0]
    a = (q * np.logspace(0, -12, N)) @ q.T
    a = (a + a.T) / 2 + (1e-11 * np.eye(N) if assume_a != "general" else 0)
    b = values(N, 45)  # several columns of tiles
    x = linalg.solve(stored(a), stored(b), assume_a=assume_a, executor=pool).to_numpy()
    assert backward(a @ x - b, a, x) < 3, "backward stable, whatever the condition"


@pytest.mark.slow
def test_products_of_views(pool, stored):
    a, b = values(N, 45).astype("float32"), values(N, 33).astype("float32")
    c = linalg.matmul(stored(a).T, stored(b), executor=pool)
    assert c.dtype == "float32"
    np.testing.assert_allclose(c.to_numpy(), a.T @ b, rtol=1e-4, atol=1e-4)


@pytest.mark.slow
def test_what_turns_out_not_to_be_possible_names_tile_and_row(pool, stored):
    a = np.eye(N)
    a[67, 67] = -1.0
    with pytest.raises(NotPositiveDefinite, match=r"order 4 of the tile .* \(cholesky, L\[2, 2\]") as caught:
        linalg.cholesky(stored(a), executor=pool)
    assert caught.value.position == 3
    assert isinstance(pickle.loads(pickle.dumps(caught.value)), np.linalg.LinAlgError)
    assert issubclass(SingularMatrix, np.linalg.LinAlgError)
    with pytest.raises(SingularMatrix, match=r"exactly zero: row 1 of the matrix \(lu, L\[0, 0\], U\[0, 0\], P\[0, 0\]"):
        linalg.solve(stored(np.ones((N, N))), stored(values(N, 40)), executor=pool)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda m: linalg.cholesky(m(values(4, 3))), "cholesky needs a square matrix, this one is 4 x 3"),
        (lambda m: linalg.lu(m(values(8, 8), (4, 2))), "needs square tiles, those of this matrix are 4 x 2; store it with tile=2"),
        (lambda m: linalg.matmul(m(values(4, 3)), m(values(4, 3))), "4 x 3 and 4 x 3 cannot be multiplied"),
        (lambda m: linalg.matmul(m(values(8, 8), 2), m(values(8, 8), 4)), "store both with the same tile"),
        (lambda m: linalg.matmul(m(values(4, 4)), m(values(4, 4, "float32"))), "a product of float64 and float32"),
        (lambda m: linalg.solve(m(values(4, 4)), m(values(3, 1))), "the matrix has 4 rows, the right-hand sides have 3"),
        (lambda m: linalg.solve(m(values(4, 4)), m(values(4, 1)), assume_a="sym"), "use 'general' or 'positive definite'"),
        (lambda m: linalg.qr(m(values(3, 4), (3, 4))), "qr needs square tiles, those of this matrix are 3 x 4"),
        (lambda m: linalg.lstsq(m(values(3, 4)), m(values(3, 1))), "lstsq needs as many rows as columns, this matrix is 3 x 4"),
        (lambda m: linalg.svd(m(values(9, 8), (4, 3))), "svd needs square tiles where a matrix has several columns of them"),
    ],
)
def test_what_cannot_be_computed_is_refused_before_anything_starts(stored, call, says):
    with pytest.raises(JobError, match=says):
        call(stored)


@pytest.mark.slow
def test_the_command(tmp_path, monkeypatch):
    class Observed(FunctionExecutor):
        def __init__(self, *arguments, **options):
            super().__init__(*arguments, **options)
            given.update(options)

    given = {}
    monkeypatch.setattr("ephemeron.executor.FunctionExecutor", Observed)
    a, b = values(40, 40), values(40, 2)
    np.save(tmp_path / "a.npy", a)
    np.save(tmp_path / "b.npy", b)
    run = CliRunner().invoke
    done = run(
        main,
        [
            "linalg",
            "solve",
            str(tmp_path / "a.npy"),
            str(tmp_path / "b.npy"),
            "--out",
            str(tmp_path / "x.npy"),
            "--tile",
            "16",
            "--json",
            "--autoscaling-factor",
            "0.5",
            "--idle-timeout",
            "7",
        ],
    )
    assert done.exit_code == 0, done.output
    assert (given["autoscaling_factor"], given["idle_timeout_s"]) == (0.5, 7.0)
    found = json.loads(done.output)
    assert {"tasks", "seconds", "core_seconds", "bytes_read", "bytes_written", "cost_usd", "files"} <= set(found)
    np.testing.assert_allclose(a @ np.load(tmp_path / "x.npy"), b, atol=1e-10)
    for arguments, says in (
        (["cholesky", "none.npy", "--out", "l.npy"], "there is no"),
        (["cholesky", "a.npy", "--out", "l"], "is neither .npy nor .zarr"),
        (["qr", "a.npy", "--out", "l.npy"], "is one file, and there are 2 results; give a folder"),
        (["svd", "a.npy", "--out", "none/f"], "there is no folder"),
    ):
        name, file, _, out = arguments
        refused = run(main, ["linalg", name, str(tmp_path / file), "--out", str(tmp_path / out)])
        assert refused.exit_code == 2
        assert says in refused.output + str(refused.stderr)


@pytest.mark.slow
def test_the_command_with_zarr(tmp_path, monkeypatch):
    zarr = pytest.importorskip("zarr", reason="Zarr is not installed")
    monkeypatch.chdir(tmp_path)
    a = values(40, 12)
    zarr.create_array("a.zarr", data=a, chunks=(9, 9))
    np.save("b.npy", values(40, 1)[:, 0])
    run = CliRunner().invoke
    done = run(main, ["linalg", "svd", "a.zarr", "--out", "f", "--tile", "16", "--json"])
    assert done.exit_code == 0, done.output
    assert json.loads(done.output)["files"] == {"U": "f/U.zarr", "s": "f/s.npy", "Vh": "f/Vh.zarr"}
    u, vh = (zarr.open_array(f"f/{name}.zarr")[:] for name in ("U", "Vh"))
    np.testing.assert_allclose(u * np.load("f/s.npy") @ vh, a, atol=1e-12)
    done = run(main, ["linalg", "lstsq", "a.zarr", "b.npy", "--out", "x.npy", "--tile", "16"])
    assert done.exit_code == 0, done.output
    np.testing.assert_allclose(np.load("x.npy")[:, 0], np.linalg.lstsq(a, np.load("b.npy"))[0], atol=1e-12)


@pytest.mark.slow
def test_arrays_beside_a_matrix_are_stored_for_as_long_as_it_takes(pool, stored, tmp_path):
    a, b = values(N, N) + N * np.eye(N), values(N, 3)
    big = stored(a)
    for found, wanted in (
        (linalg.solve(big, b, executor=pool), np.linalg.solve(a, b)),
        (linalg.lstsq(big, b[:, 0], executor=pool), np.linalg.solve(a, b[:, 0])),
        (linalg.matmul(big, b, executor=pool), a @ b),
        ((big @ b[:, 0]).compute(executor=pool), a @ b[:, 0]),
        ((b[:, 0] @ big).compute(executor=pool), b[:, 0] @ a),
    ):
        np.testing.assert_allclose(found.to_numpy(), wanted, rtol=1e-10, atol=1e-10)
        found.delete()
    left = {path.parent.name for path in (tmp_path / "matrices").rglob("*.*")}
    assert left == {big.stored.name}


def test_what_is_no_matrix_is_refused(stored):
    big = stored(values(N, N))
    with pytest.raises(JobError, match="cholesky takes a BigMatrix, this is a list; store it first"):
        linalg.cholesky([[1.0]])
    with pytest.raises(JobError, match="solve: right-hand sides of type list; give a BigMatrix or a NumPy array"):
        linalg.solve(big, [1.0] * N)
    with pytest.raises(JobError, match="70 rows, the right-hand sides have 3"):
        linalg.solve(big, np.ones(3))
    with pytest.raises(JobError, match=r"a matrix cannot be named '\.\./x'"):
        linalg.BigMatrix.from_numpy(values(3, 3), store=big.stored.store, name="../x")
