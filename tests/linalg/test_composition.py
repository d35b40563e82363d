"""Programs made of programs: the results are those of the programs one after the other; what only the next one reads is temporary."""

from __future__ import annotations

import numpy as np
import pytest
from tiling import count, joined, random, tiled

from ephemeron.errors import JobError
from ephemeron.linalg.algorithms.equations import adjoint_substitution, cholesky, forward_substitution
from ephemeron.linalg.algorithms.products import matmul
from ephemeron.linalg.algorithms.qr import flat_form_q, flat_qr, flat_thin_qr, form_q, qr, thin_qr
from ephemeron.linalg.analysis.dependencies import Analysis
from ephemeron.linalg.analysis.unrolled import UnrolledGraph, has_more_tasks
from ephemeron.linalg.embedding import in_sequence, renamed
from ephemeron.linalg.interpret import interpret
from ephemeron.linalg.language.parser import parse_program
from ephemeron.linalg.language.program import Role

TILE = 8
SOLVE = in_sequence("positive_solve", cholesky, renamed(forward_substitution, X="Y"), renamed(adjoint_substitution, B="Y"), keeps=("L",))


@pytest.mark.parametrize("shape", [(8, 8), (20, 20), (40, 24), (24, 40), (29, 29)])
@pytest.mark.parametrize(("both", "factor", "form"), [(flat_thin_qr, flat_qr, flat_form_q), (thin_qr, qr, form_q)])
def test_q_and_r_have_the_bits_of_the_two_programs(both, factor, form, shape):
    sizes, a = {"M": count(shape[0], TILE), "N": count(shape[1], TILE)}, {"A": tiled(random(shape, "float64"), TILE)}
    made, factors = interpret(both, sizes, a), interpret(factor, sizes, a)
    q = interpret(form, sizes, {"V": factors["V"], "T": factors["T"]})["Q"]
    for expected, found in ((factors["R"], made["R"]), (q, made["Q"])):
        assert expected.keys() == found.keys()
        assert all(np.array_equal(expected[index], found[index]) for index in expected)
    assert {m.name for m in both.matrices if m.role is Role.OUTPUT} == {"Q", "R"}
    assert {m.name for m in both.matrices if m.role is Role.INPUT} == {"A"}


@pytest.mark.parametrize("both", [flat_thin_qr, thin_qr, SOLVE])
@pytest.mark.parametrize("n", [1, 2, 4])
def test_its_analysis_equals_the_unrolled_graph(both, n):
    sizes = {name: max(1, n - k) for k, name in enumerate(both.sizes)}
    graph, analysis = UnrolledGraph(both, sizes), Analysis(both, sizes)
    assert analysis.count() == graph.count()
    for node in graph.nodes:
        assert analysis.downstream(node) == graph.downstream(node)
        assert analysis.upstream_count(node) == graph.upstream_count(node)
    assert has_more_tasks(both, sizes, graph.count() - 1)
    assert not has_more_tasks(both, sizes, graph.count())


def test_equations_in_one_program():
    n, g = 20, random((20, 20), "complex128")
    a, b = g @ g.conj().T + n * np.eye(n), random((n, 5), "complex128", 1)
    made = interpret(SOLVE, {"N": count(n, TILE), "M": 1}, {"A": tiled(a, TILE), "B": tiled(b, TILE)})
    x = joined(made["X"], (n, 5), TILE, "complex128")
    assert np.allclose(a @ x, b)
    assert SOLVE.matrix("L").role is Role.OUTPUT
    assert SOLVE.matrix("Y").role is Role.TEMPORARY
    assert {m.name for m in SOLVE.matrices if m.name.startswith("S")} == {"S", "S1", "S2"}


def test_it_travels_as_text():
    assert parse_program(str(SOLVE), dict(SOLVE.kernels)) == SOLVE


def test_what_does_not_fit_is_refused():
    with pytest.raises(JobError, match="has no parameter Z"):
        renamed(cholesky, Z="A")
    with pytest.raises(JobError, match="has a name L already"):
        renamed(cholesky, A="L")
    with pytest.raises(JobError, match=r"L of twice is made by a program after another one"):
        in_sequence("twice", cholesky, cholesky)
    with pytest.raises(JobError, match=r"A of late is made by a program after another one"):
        in_sequence("late", matmul, renamed(cholesky, A="G", L="A"))
