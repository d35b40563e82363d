"""Dependencies by equations are those of the unrolled graph, and cost the same for a million tiles as for a hundred."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from lambdapack_kernels import KERNELS
from random_programs import programs

from ephemeron.errors import ProgramError
from ephemeron.linalg.algorithms.equations import cholesky
from ephemeron.linalg.analysis.dependencies import Analysis
from ephemeron.linalg.analysis.unrolled import UnrolledGraph, chain_orders, check_unrolled
from ephemeron.linalg.language.parser import parse_text
from ephemeron.linalg.language.program import Node

CHOLESKY = """
def cholesky(A: Input, L: Output, S: Temporary, N: Size):
    tiles(A, N, N)
    tiles(L, N, N)
    for i in range(N):
        if i == 0:
            L[i, i] = combine(A[i, i])
        else:
            L[i, i] = combine(S[i, i, i])
        for j in range(i + 1, N):
            if i == 0:
                L[j, i] = combine(L[i, i], A[j, i])
            else:
                L[j, i] = combine(L[i, i], S[i, j, i])
            for k in range(i + 1, j + 1):
                if i == 0:
                    S[i + 1, j, k] = combine(A[j, k], L[j, i], L[k, i])
                else:
                    S[i + 1, j, k] = combine(S[i, j, k], L[j, i], L[k, i])
"""
TREE = """
def tree(A: Input, R: Temporary, B: Output, N: Size):
    tiles(A, N)
    tiles(B, 1)
    depth = ceil_log2(N)
    for j in range(N):
        R[0, j] = combine(A[j])
    for level in range(depth):
        for j in range(0, N, 2**(level + 1)):
            if j + 2**level < N:
                R[level + 1, j] = combine(R[level, j], R[level, j + 2**level])
            else:
                R[level + 1, j] = combine(R[level, j])
    B[0] = combine(R[depth, 0])
"""


def parsed(text):
    return parse_text(text, KERNELS)


def compare(graph, analysis):
    """Every answer of the analysis is the unrolled graph's."""
    assert analysis.count() == graph.count()
    for node in graph.nodes:
        assert analysis.bindings(node) == graph.bindings(node)
        assert analysis.reads(node) == graph.reads(node)
        assert analysis.writes(node) == graph.writes(node)
        assert analysis.downstream(node) == graph.downstream(node)
        assert analysis.upstream(node) == graph.upstream(node)
        assert analysis.upstream_count(node) == graph.upstream_count(node)
        for tile in {*graph.reads(node), *graph.writes(node)}:
            assert analysis.reader_count(*tile) == graph.reader_count(*tile)
            assert analysis.writer(*tile) == graph.writer(*tile)


@pytest.mark.parametrize("text", [CHOLESKY, TREE])
@pytest.mark.parametrize("n", [1, 2, 3, 5, 8])
def test_equal_to_the_unrolled_graph(text, n):
    graph, analysis = UnrolledGraph(parsed(text), {"N": n}), Analysis(parsed(text), {"N": n})
    compare(graph, analysis)
    assert sorted(analysis.start_nodes()) == sorted(graph.start_nodes())
    assert analysis.start_count() == len(list(graph.start_nodes()))
    analysis.verify()


def check_random(text, n, m):
    program = parsed(text)
    sizes = {"N": n, "M": m}
    try:
        check_unrolled(program, sizes)
        valid = True
    except ProgramError:
        valid = False
    analysis = Analysis(program, sizes)
    if valid:
        analysis.verify()
    else:
        with pytest.raises(ProgramError):
            analysis.verify()
    try:
        graph = UnrolledGraph(program, sizes)
    except ProgramError:
        return
    compare(graph, analysis)
    if valid:
        assert sorted(analysis.start_nodes()) == sorted(graph.start_nodes())


SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@pytest.mark.slow
@settings(max_examples=40, deadline=None, suppress_health_check=SLOW)
@given(programs(), st.integers(1, 4), st.integers(1, 4))
def test_random_programs(text, n, m):
    assume(text.count("\n") < 16)
    check_random(text, n, m)


@pytest.mark.slow
@settings(max_examples=100, deadline=None, derandomize=True, suppress_health_check=SLOW)
@given(programs(), st.integers(1, 5), st.integers(1, 4))
def test_many_random_programs(text, n, m):
    check_random(text, n, m)


def test_two_outputs_of_one_call_that_meet_in_different_iterations_are_refused():
    text = """def shifted(A: Input, W: Temporary, N: Size, M: Size):
    for i in range(0, N, 1):
        for j in range(0, N, 1):
            W[i, j + ceil_log2(i + 2)], W[i, j] = pair(A[0, 0])
"""
    with pytest.raises(ProgramError, match="writes it too"):
        Analysis(parsed(text), {"N": 2, "M": 1}).verify()
    check_random(text, 2, 1)


def steps_of(program, n, ask):
    analysis = Analysis(program, {"N": n})
    before = analysis.steps.taken
    ask(analysis)
    return before, analysis.steps.taken - before


@pytest.mark.parametrize(
    "ask",
    [
        lambda a: a.downstream(Node(18, (1, 7, 4))),
        lambda a: a.upstream(Node(18, (3, 7, 4))),
        lambda a: a.reader_count("L", (5, 5)),
        lambda a: a.count(),
        lambda a: a.start_count(),
        lambda a: list(islice(a.readers("L", (5, 5)), 3)),
        lambda a: a.verify(),
    ],
)
def test_steps_do_not_depend_on_the_number_of_tiles(ask):
    program = parsed(CHOLESKY)
    small, large = steps_of(program, 100, ask), steps_of(program, 1_000_000, ask)  # 10**4 and 10**12 tiles of A
    assert small == large
    assert large[1] < 10_000


def test_steps_grow_with_the_depth_of_a_tree_only():
    program = parsed(TREE)
    depth = {n: steps_of(program, n, lambda a: a.verify())[1] / n.bit_length() ** 2 for n in (64, 2**20)}
    assert depth[2**20] < 2 * depth[64]
    query = [steps_of(program, n, lambda a: a.downstream(Node(12, (1, 4))))[1] for n in (64, 2**20)]
    assert query[1] <= 2 * query[0]


def test_counts_at_sizes_that_cannot_be_unrolled():
    n = 10**6
    analysis = Analysis(parsed(CHOLESKY), {"N": n})
    assert analysis.count() == n + n * (n - 1) // 2 + (n - 1) * n * (n + 1) // 6
    assert analysis.reader_count("L", (0, 0)) == n - 1
    assert analysis.reader_count("L", (n - 1, n - 1)) == 0
    assert list(analysis.start_nodes()) == [Node(6, (0,))]
    assert Analysis(parsed(TREE), {"N": 2**20}).count() == 2**20 + 2**20 - 1 + 1


VIOLATIONS = [
    ("        B[i] = combine(A[i + 1])", "A[i + 1] is A[9]", "out of bounds"),
    ("        B[i - 1] = combine(A[i])", "B[i - 1] is B[-1]", "out of bounds"),
    ("        B[i // 2] = combine(A[i])", "B[i // 2] writes B[0]", "written once"),
    ("        T[i] = combine(A[i])\n        B[i] = combine(T[N - 1 - i])", "T[N - 1 - i]", "not written before"),
    ("        B[i] = combine(T[2 * i])\n        T[2 * i + 1] = combine(A[i])", "T[2 * i] reads T[0]", "never written"),
]


@pytest.mark.parametrize(("body", "what", "why"), VIOLATIONS)
@pytest.mark.parametrize("n", [9, 10**9])
def test_violations_are_found_at_any_size(body, what, why, n):
    temporary = "T: Temporary, " if "T[" in body else ""
    text = f"def bad(A: Input, {temporary}B: Output, N: Size):\n    tiles(A, N)\n    tiles(B, N)\n    for i in range(N):\n{body}"
    with pytest.raises(ProgramError) as caught:
        Analysis(parsed(text), {"N": n}).verify()
    assert what.replace("A[9]", f"A[{n}]") in str(caught.value)
    assert why in str(caught.value)
    assert caught.value.location.startswith("<program>:")


def test_tasks_with_the_longest_chain_come_first():
    graph = UnrolledGraph(cholesky, {"N": 4})
    order = chain_orders(graph)
    assert sorted(order.values()) == list(range(graph.count()))
    for node in graph.nodes:
        assert all(order[node] < order[child] for child in graph.downstream(node))
    factors = [node for node in graph.nodes if graph.call(node).kernel == "cholesky_factor"]
    kernels = ("multiply_subtract", "subtract_gram")
    updates = [node for node in graph.nodes if graph.call(node).kernel in kernels and node.indices[0] == 0]
    first = min(updates, key=order.__getitem__)
    assert first.indices == (0, 1), "what the next factor waits for"
    assert order[factors[1]] < order[max(updates, key=order.__getitem__)], "before the last updates of the first step"
