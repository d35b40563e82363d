"""Reductions to band form, run by the interpreter: similar matrices, orthogonal factors, ragged tiles, all dtypes."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.linalg import norm
from tiling import conditioned, count, epsilon, joined, random, tiled

from ephemeron.errors import NotFinite, NotHermitian
from ephemeron.linalg.algorithms.spectral import apply_band_q, apply_thin_q, hermitian_band, upper_band
from ephemeron.linalg.analysis.dependencies import Analysis
from ephemeron.linalg.analysis.unrolled import UnrolledGraph
from ephemeron.linalg.interpret import interpret

TILE = 6


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
@pytest.mark.parametrize("shape", [(6, 6), (5, 3), (12, 12), (27, 27), (23, 20), (40, 15)])
def test_upper_band(dtype, shape):
    (m, n), a = shape, conditioned(*shape, 1e8, dtype)
    sizes = {"M": count(m, TILE), "N": count(n, TILE)}
    made = interpret(upper_band, sizes, {"A": tiled(a, TILE)})
    band = joined(made["B"], (n, n), TILE, dtype)
    i, j = np.indices(band.shape)
    assert not band[(j < i) | (j > i + TILE)].any()
    identity = {**sizes, "K": sizes["N"]}, tiled(np.eye(n, dtype=dtype), TILE)
    q = interpret(apply_thin_q, identity[0], {"V": made["V"], "T": made["T"], "B": identity[1]})["X"]
    right = {"N": sizes["N"], "K": sizes["N"]}
    p = interpret(apply_band_q, right, {"V": made["H"], "T": made["J"], "B": identity[1]})["X"]
    check(a, joined(q, (m, n), TILE, dtype), band, joined(p, (n, n), TILE, dtype))


def check(a, left, band, right):
    eps = 20 * max(a.shape) * epsilon(a.dtype)
    assert norm(left.conj().T @ left - np.eye(len(band))) <= eps
    assert norm(right.conj().T @ right - np.eye(len(band))) <= eps
    assert norm(left @ band @ right.conj().T - a) <= eps * norm(a)


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
@pytest.mark.parametrize("n", [1, 6, 12, 23, 34])
def test_hermitian_band(dtype, n):
    b = random((n, n), dtype)
    a, sizes = ((b + b.conj().T) / 2).astype(dtype), {"N": count(n, TILE)}
    made = interpret(hermitian_band, sizes, {"A": tiled(a, TILE)})
    below = joined(made["B"], (n, n), TILE, dtype)
    band = np.tril(below) + np.tril(below, -1).conj().T
    i, j = np.indices(band.shape)
    assert not below[i > j + TILE].any()
    given = {"V": made["V"], "T": made["T"], "B": tiled(np.eye(n, dtype=dtype), TILE)}
    q = joined(interpret(apply_band_q, {**sizes, "K": sizes["N"]}, given)["X"], (n, n), TILE, dtype)
    check(a, q, band, q)


def test_a_matrix_that_is_not_hermitian_or_not_finite_names_value_and_tile():
    a = np.eye(20)
    a[14, 3] = 0.5
    with pytest.raises(NotHermitian, match=r"at 2, 3 of the tile is 0.5, .* 0.0 \(hermitian_band, .*S\[0, 2, 0\]"):
        interpret(hermitian_band, {"N": 4}, {"A": tiled(a, TILE)})
    a[14, 3] = np.nan
    for program, sizes in ((hermitian_band, {"N": 4}), (upper_band, {"M": 4, "N": 4})):
        with pytest.raises(NotFinite, match="at 2, 3 of the tile is nan"):
            interpret(program, sizes, {"A": tiled(a, TILE)})


@pytest.mark.parametrize("program", [upper_band, hermitian_band, apply_thin_q, apply_band_q], ids=lambda p: p.name)
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
