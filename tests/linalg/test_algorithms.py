"""Algorithms run by the interpreter: backward errors within LAPACK's bounds, ragged tiles, all dtypes, ill-conditioned matrices."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.linalg import norm
from tiling import conditioned, count, epsilon, joined, random, tiled

from ephemeron.errors import JobError, NotPositiveDefinite, SingularMatrix
from ephemeron.linalg.algorithms.equations import (
    adjoint_substitution,
    backward_substitution,
    cholesky,
    forward_substitution,
    lu,
    lu_forward,
    permuted_lower,
)
from ephemeron.linalg.algorithms.jacobi import jacobi_svd
from ephemeron.linalg.algorithms.products import matmul, matmul_layers, matmul_pairs, syrk
from ephemeron.linalg.algorithms.qr import apply_q, apply_q_adjoint, flat_form_q, flat_qr, form_q, qr, tall_svd, tsqr
from ephemeron.linalg.algorithms.spectral import randomized_svd
from ephemeron.linalg.analysis.dependencies import Analysis
from ephemeron.linalg.analysis.unrolled import UnrolledGraph
from ephemeron.linalg.interpret import interpret, interpret_order

DTYPES = ["float32", "float64", "complex64", "complex128"]
TILE = 8


@pytest.fixture(params=DTYPES)
def dtype(request):
    return request.param


def run(program, sizes, **inputs):
    return interpret(program, sizes, {n: a if isinstance(a, dict) else tiled(a, TILE) for n, a in inputs.items()})


def whole(tiles, m, n, dtype):
    return joined(tiles, (m, n), TILE, dtype)


def close(a, b, dtype, factor=20.0):
    """‖a − b‖ ≤ factor · n · ε · ‖b‖ in the Frobenius norm: LAPACK's tests take 30 with the 1-norm."""
    return norm(a - b) <= factor * max(a.shape) * epsilon(dtype) * norm(b)


@pytest.mark.parametrize("shape", [(8, 8, 8), (5, 3, 2), (20, 17, 30), (9, 9, 15), (9, 9, 21), (9, 9, 75)])
def test_products(dtype, shape):
    m, n, k = shape
    a, b = random((m, k), dtype), random((k, n), dtype, 1)
    sizes = {"M": count(m, TILE), "N": count(n, TILE), "K": count(k, TILE)}
    assert close(whole(run(matmul, sizes, A=a, B=b)["C"], m, n, dtype), a @ b, dtype)
    product = whole(run(matmul, sizes, A=a, B=b)["C"], m, n, dtype)
    assert np.array_equal(whole(run(matmul_pairs, sizes, A=a, B=b)["C"], m, n, dtype), product)
    for layers in (1, 2, 3):
        made = run(matmul_layers, {**sizes, "Q": layers}, A=a, B=b)["C"]
        assert close(whole(made, m, n, dtype), a @ b, dtype)
    lower = whole(run(syrk, {"N": sizes["M"], "K": sizes["K"]}, A=a)["C"], m, m, dtype)
    assert close(np.tril(lower), np.tril(a @ a.conj().T), dtype)


def positive(n, dtype, condition=100.0):
    u, _ = np.linalg.qr(random((n, n), "complex128" if np.dtype(dtype).kind == "c" else "float64"))
    a = (u * np.geomspace(1, 1 / condition, n)) @ u.conj().T
    return ((a + a.conj().T) / 2).astype(dtype)


@pytest.mark.parametrize("n", [1, 8, 16, 29])
@pytest.mark.parametrize("condition", [10.0, 1e4])
def test_cholesky_and_substitution(dtype, n, condition):
    a, b, sizes = positive(n, dtype, condition), random((n, 11), dtype), {"N": count(n, TILE)}
    lower = run(cholesky, sizes, A=a)["L"]
    factor = whole(lower, n, n, dtype)
    assert np.array_equal(factor, np.tril(factor))
    assert close(factor @ factor.conj().T, a, dtype)
    y = run(forward_substitution, {**sizes, "M": 2}, L=lower, B=b)["X"]
    x = whole(run(adjoint_substitution, {**sizes, "M": 2}, L=lower, B=y)["X"], n, 11, dtype)
    assert norm(a @ x - b) <= 20 * n * epsilon(dtype) * (norm(a) * norm(x) + norm(b))


def test_a_matrix_that_is_not_positive_definite_names_block_and_task():
    a = np.eye(20)
    a[17, 17] = -1.0
    with pytest.raises(NotPositiveDefinite, match=r"order 2 of the tile .*task 8:2, L\[2, 2\]") as caught:
        run(cholesky, {"N": 3}, A=a)
    assert caught.value.position == 1


@pytest.mark.parametrize("n", [1, 8, 16, 29, 40])
@pytest.mark.parametrize("condition", [10.0, 1e12])
def test_lu_and_solve(dtype, n, condition):
    a, b = conditioned(n, n, condition, dtype), random((n, 11), dtype)
    check_lu(a, b, dtype)


def check_lu(a, b, dtype):
    n, sizes = len(a), {"N": count(len(a), TILE)}
    made, growth = check_factors(a, dtype)
    y = run(lu_forward, {**sizes, "M": count(b.shape[1], TILE)}, L=made["L"], P=made["P"], B=b)["X"]
    solved = run(backward_substitution, {**sizes, "M": count(b.shape[1], TILE)}, U=made["U"], B=y)["X"]
    x = whole(solved, n, b.shape[1], dtype)
    assert norm(a @ x - b) <= 20 * n * growth * epsilon(dtype) * (norm(a) * norm(x) + norm(b))


def check_factors(a, dtype):
    (m, n), k = a.shape, min(a.shape)
    sizes = {"M": count(m, TILE), "N": count(n, TILE)}
    made = run(lu, sizes, A=a)
    upper, below = whole(made["U"], k, n, dtype), run(permuted_lower, sizes, L=made["L"], P=made["P"])["F"]
    factor = whole(below, m, k, dtype)
    assert np.array_equal(factor, np.tril(factor))
    assert np.array_equal(factor.diagonal(), np.ones(k))
    assert np.array_equal(upper, np.triu(upper))
    order = permutation(made["P"], m)
    assert sorted(order) == list(range(m))
    growth = norm(np.abs(factor) @ np.abs(upper)) / norm(a)
    assert growth < 10 * max(m, n)
    assert close(factor @ upper, a[order], dtype, factor=5 * growth)
    return made, growth


@pytest.mark.parametrize("shape", [(40, 13), (29, 16), (8, 3), (13, 30), (5, 24), (29, 27), (27, 29)])
def test_lu_of_rectangular_matrices(dtype, shape):
    check_factors(conditioned(*shape, 1e6, dtype), dtype)


def permutation(pivots, n):
    """Row numbers of A in the order of P A, from the lists of pivots."""
    order = np.arange(n)
    for k in range(len(pivots)):
        listed = [(int(t) * TILE + int(r)) for t, r in pivots[k, 0]]
        top = [r for r in range(k * TILE, min((k + 1) * TILE, n)) if r not in listed]
        below = [r for r in listed if r >= (k + 1) * TILE]
        before = order.copy()
        order[k * TILE : k * TILE + len(listed)] = before[listed]
        for source, place in zip(top, below, strict=True):
            order[place] = before[source]
    return order


def test_lu_of_matrices_that_need_their_pivots():
    n = 24
    rng = np.random.default_rng(3)
    check_lu(np.eye(n)[rng.permutation(n)], np.ones((n, 3)), "float64")
    tiny = np.eye(n)[::-1] + 1e-18 * rng.standard_normal((n, n))
    check_lu(tiny, np.ones((n, 3)), "float64")
    blocks = rng.standard_normal((n, n))
    blocks[:8, :8] = 0.0  # the first tile is singular, the matrix is not
    check_lu(blocks, np.ones((n, 3)), "float64")


def test_a_singular_matrix_is_refused():
    a = random((20, 20), "float64")
    a[:, 11] = 0.0
    with pytest.raises(SingularMatrix, match="exactly zero"):
        run(lu, {"M": 3, "N": 3}, A=a)


@pytest.mark.parametrize("shape", [(8, 8), (5, 3), (16, 16), (29, 29), (43, 13), (60, 24), (13, 30), (57, 33)])
@pytest.mark.parametrize("condition", [10.0, 1e12])
def test_qr(dtype, shape, condition):
    (m, n), a = shape, conditioned(*shape, condition, dtype)
    sizes = {"M": count(m, TILE), "N": count(n, TILE)}
    made = run(qr, sizes, A=a)
    r = joined(made["R"], (min(sizes["M"], sizes["N"]) * TILE, n), TILE, dtype)[: min(m, n)]
    assert np.array_equal(r, np.triu(r))
    identity = np.eye(m, dtype=dtype)
    q = whole(run(apply_q, {**sizes, "K": sizes["M"]}, V=made["V"], T=made["T"], B=identity)["X"], m, m, dtype)
    assert norm(q.conj().T @ q - identity) <= 20 * m * epsilon(dtype)
    assert close(q[:, : min(m, n)] @ r, a, dtype)
    if m >= n:
        thin = whole(run(form_q, sizes, V=made["V"], T=made["T"])["Q"], m, n, dtype)
        assert close(thin, q[:, :n], dtype)
    turned = run(apply_q_adjoint, {**sizes, "K": sizes["N"]}, V=made["V"], T=made["T"], B=a)["X"]
    expected = np.zeros((m, n), dtype)
    expected[: min(m, n)] = r
    assert close(whole(turned, m, n, dtype), expected, dtype)


@pytest.mark.parametrize("shape", [(8, 8), (5, 3), (16, 16), (29, 29), (43, 29), (60, 24), (13, 30), (24, 57), (57, 33)])
@pytest.mark.parametrize("condition", [10.0, 1e12])
def test_qr_down_the_columns(dtype, shape, condition):
    (m, n), a = shape, conditioned(*shape, condition, dtype)
    k, sizes = min(m, n), {"M": count(m, TILE), "N": count(n, TILE)}
    made = run(flat_qr, sizes, A=a)
    r = joined(made["R"], (min(sizes["M"], sizes["N"]) * TILE, n), TILE, dtype)[:k]
    assert np.array_equal(r, np.triu(r))
    q = whole(run(flat_form_q, sizes, V=made["V"], T=made["T"])["Q"], m, k, dtype)
    assert norm(q.conj().T @ q - np.eye(k)) <= 20 * m * epsilon(dtype)
    assert close(q @ r, a, dtype)


@pytest.mark.parametrize("condition", [10.0, 1e10])
def test_least_squares(condition):
    m, n = 50, 19
    a, b = conditioned(m, n, condition, "float64"), random((m, 4), "float64")
    sizes = {"M": count(m, TILE), "N": count(n, TILE)}
    made = run(qr, sizes, A=a)
    turned = run(apply_q_adjoint, {**sizes, "K": 1}, V=made["V"], T=made["T"], B=b)["X"]
    r, c = joined(made["R"], (24, n), TILE, "float64")[:n], whole(turned, m, 4, "float64")[:n]
    x = whole(run(backward_substitution, {"N": sizes["N"], "M": 1}, U=r, B=c)["X"], n, 4, "float64")
    best = np.linalg.lstsq(a, b, rcond=None)[0]
    assert norm(a @ x - b) <= norm(a @ best - b) + 20 * m * epsilon("float64") * norm(a) * norm(x)
    residual = b - a @ x
    assert norm(a.T @ residual) <= 100 * m * epsilon("float64") * norm(a) * (norm(residual) + norm(a) * norm(x))


@pytest.mark.parametrize("m", [3, 8, 16, 24, 59, 100])
def test_tall_matrices(dtype, m):
    n = 5
    a = conditioned(m, n, 1e5, dtype)
    made = run(tsqr, {"M": count(m, TILE)}, A=a)
    k = min(m, n)
    q, r = whole(made["Q"], m, k, dtype), made["R"][0, 0]
    assert norm(q.conj().T @ q - np.eye(k)) <= 20 * m * epsilon(dtype)
    assert close(q @ r, a, dtype)
    made = run(tall_svd, {"M": count(m, TILE)}, Q=made["Q"], R=made["R"])
    u, s, vh = whole(made["U"], m, k, dtype), made["D"][0, 0][0], made["W"][0, 0]
    assert close((u * s) @ vh, a, dtype)
    exact = np.linalg.svd(a.astype("complex128"), compute_uv=False)
    assert np.all(np.abs(s - exact) <= 20 * m * epsilon(dtype) * exact[0])


@pytest.mark.parametrize("shape", [(29, 43), (40, 13), (8, 8), (30, 21)])
def test_randomized_svd(dtype, shape):
    (m, n), k = shape, 5
    u, _ = np.linalg.qr(random((m, k), dtype))
    v, _ = np.linalg.qr(random((n, k), dtype, 1))
    values = np.array([8.0, 4.0, 2.0, 1.0, 0.5])
    a = ((u * values) @ v.conj().T).astype(dtype) + random(shape, dtype, 2) * 1e-2 * epsilon(dtype)
    sizes = {"M": count(m, TILE), "N": count(n, TILE), "R": 2, "L": 7}
    made = run(randomized_svd, sizes, A=a, O=random((n, 7), dtype, 3))
    left, right, s = whole(made["U"], m, 7, dtype), whole(made["V"], n, 7, dtype), made["D"][0, 0][0]
    assert np.all(np.abs(s[:k] - values) <= 50 * max(m, n) * epsilon(dtype) * values[0])
    assert np.all(s[k:] <= 50 * max(m, n) * epsilon(dtype) * values[0])
    assert close((left * s) @ right.conj().T, a, dtype)
    assert norm(left.conj().T @ left - np.eye(7)) <= 50 * m * epsilon(dtype)
    assert norm(right.conj().T @ right - np.eye(7)) <= 50 * n * epsilon(dtype)


@pytest.mark.parametrize("shape", [(16, 16), (29, 29), (40, 13), (13, 30), (6, 6)])
@pytest.mark.parametrize("condition", [10.0, 1e12])
def test_jacobi_svd(dtype, shape, condition):
    (m, n), a = shape, conditioned(*shape, condition, dtype)
    sizes = {"M": count(m, TILE), "N": count(n, TILE), "W": 8}
    made = run(jacobi_svd, sizes, A=a)
    x, v = whole(made["X"], m, n, dtype), whole(made["V"], n, n, dtype)
    assert norm(v.conj().T @ v - np.eye(n)) <= 50 * n * epsilon(dtype)
    assert close(x @ v.conj().T, a, dtype, factor=50)
    r = np.linalg.qr(x)[1][:, : min(m, n)]
    off, exact = r - np.diag(r.diagonal()), np.linalg.svd(a.astype("complex128"), compute_uv=False)
    assert norm(off) <= 50 * n * epsilon(dtype) * exact[0]
    assert np.all(np.abs(np.abs(r.diagonal()) - exact) <= 50 * n * epsilon(dtype) * exact[0])


def test_eigenvalues_of_a_hermitian_matrix(dtype):
    n = 29
    b = random((n, n), dtype)
    a = ((b + b.conj().T) / 2).astype(dtype)
    shift = float(norm(a))
    made = run(jacobi_svd, {"M": 4, "N": 4, "W": 8}, A=(a + shift * np.eye(n)).astype(dtype))
    v = whole(made["V"], n, n, dtype)
    values = norm(whole(made["X"], n, n, dtype), axis=0) - shift
    assert norm(a @ v - v * values) <= 50 * n * epsilon(dtype) * norm(a)
    assert np.all(np.abs(values - np.linalg.eigvalsh(a)[::-1]) <= 50 * n * epsilon(dtype) * norm(a))


ALL = [
    matmul,
    matmul_layers,
    matmul_pairs,
    syrk,
    cholesky,
    forward_substitution,
    adjoint_substitution,
    backward_substitution,
    lu,
    lu_forward,
    permuted_lower,
    qr,
    form_q,
    flat_qr,
    flat_form_q,
    apply_q,
    apply_q_adjoint,
    tsqr,
    tall_svd,
    randomized_svd,
    jacobi_svd,
]


@pytest.mark.parametrize("program", ALL, ids=lambda p: p.name)
@pytest.mark.parametrize("n", [1, 2, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_the_analysis_equals_the_unrolled_graph(program, n):
    sizes = {name: max(1, n - k) for k, name in enumerate(program.sizes)}
    graph, analysis = UnrolledGraph(program, sizes), Analysis(program, sizes)
    assert analysis.count() == graph.count()
    assert sorted(analysis.start_nodes()) == sorted(graph.start_nodes())
    for node in graph.nodes:
        assert analysis.downstream(node) == graph.downstream(node)
        assert analysis.upstream(node) == graph.upstream(node)
        for tile in graph.writes(node):
            assert analysis.reader_count(*tile) == graph.reader_count(*tile)


@pytest.mark.parametrize(
    "program", [matmul, matmul_pairs, syrk, cholesky, forward_substitution, adjoint_substitution], ids=lambda p: p.name
)
def test_verified_at_sizes_with_more_tiles_than_could_be_unrolled(program):
    analysis = Analysis(program, dict.fromkeys(program.sizes, 1000))
    analysis.verify()
    assert analysis.count() >= 1000


def test_any_order_that_respects_the_dependencies_gives_the_same_bits():
    a = random((29, 29), "float64")
    analysis = Analysis(lu, {"M": 4, "N": 4})
    rng = np.random.default_rng(0)
    waiting, ready, order = {}, list(analysis.start_nodes()), []
    while ready:
        node = ready.pop(int(rng.integers(len(ready))))
        order.append(node)
        for other in analysis.downstream(node):
            waiting[other] = waiting.get(other, analysis.upstream_count(other)) - 1
            if waiting[other] == 0:
                ready.append(other)
    assert len(order) == analysis.count()
    first, second = run(lu, {"M": 4, "N": 4}, A=a), interpret_order(analysis, order, {"A": tiled(a, TILE)})
    for name in first:
        assert all(np.array_equal(first[name][index], second[name][index]) for index in first[name])


def test_inputs_must_be_those_of_the_program():
    with pytest.raises(JobError, match="its inputs are A, B"):
        interpret(matmul, {"M": 1, "N": 1, "K": 1}, {"A": {}})
