"""Programs are parsed from source without being run, refused at the right place, and printed as text that parses again."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest
from hypothesis import given, settings
from lambdapack_kernels import KERNELS, combine, pair, scale
from random_programs import programs

from ephemeron.errors import JobError, ProgramError
from ephemeron.linalg.algorithms.equations import cholesky, lu
from ephemeron.linalg.algorithms.qr import qr
from ephemeron.linalg.analysis.unrolled import UnrolledGraph
from ephemeron.linalg.drawing import compressed_edges, compressed_svg, compressed_text, unrolled_svg
from ephemeron.linalg.embedding import Input, Output, Size, Temporary, lambdapack, tiles
from ephemeron.linalg.language.parser import parse_function, parse_program, parse_text


@pytest.mark.parametrize("program", [cholesky, lu, qr], ids=lambda p: p.name)
def test_the_text_parses_to_the_same_program(program):
    again = parse_program(str(program), dict(program.kernels))
    assert str(again) == str(program)
    assert again.kernels == program.kernels
    assert again.matrices == program.matrices
    assert list(again.calls) == list(program.calls)


@settings(max_examples=15, deadline=None)
@given(programs())
def test_the_text_of_random_programs_is_a_fixed_point(text):
    once = str(parse_text(text, KERNELS))
    assert str(parse_text(once, KERNELS)) == once


def test_lines_of_nodes_are_lines_of_the_text():
    lines = str(lu).splitlines()
    for number, call in lu.calls.items():
        assert f"= {call.kernel}(" in lines[number - 1]
        assert str(call.outputs[0]) in lines[number - 1]


def test_the_function_is_never_executed():
    def program(A: Input, B: Output, N: Size) -> None:
        tiles(B, N)
        for i in range(N):
            B[i] = combine(A[i])

    def unread(*_):
        raise AssertionError("executed")

    combined = combine.function
    try:
        object.__setattr__(combine, "function", unread)
        with pytest.raises(AssertionError, match="executed"):
            combine(1)
        assert UnrolledGraph(parse_function(program), {"N": 3}).count() == 3
    finally:
        object.__setattr__(combine, "function", combined)


def body(*lines):
    return "def f(A: Input, T: Temporary, B: Output, N: Size, M: Size):\n" + "".join(f"    {line}\n" for line in lines)


REFUSED = [
    (["B[0] = combine(A[N / 2])"], 2, 22, "N / 2 is no integer expression; use //"),
    (["B[0] = combine(A[1.5])"], 2, 22, "1.5 is no integer"),
    (["B[0] = combine(A[x])"], 2, 22, "x is not defined here"),
    (["B[0] = combine(A[T])"], 2, 22, "T is a matrix"),
    (["B[0] = combine(A)"], 2, 20, "A is a matrix (Input), where an integer is needed"),
    (["A[0] = combine(A[0])"], 2, 5, "A is an input, and is written"),
    (["C[0] = combine(A[0])"], 2, 5, "C is no matrix"),
    (["B[0] = frobnicate(A[0])"], 2, 12, "calls no kernel; kernels here: combine, pair, scale"),
    (["B[0] = A[0] + A[1]"], 2, 12, "calls no kernel"),
    (["B[0] = pair(A[0])"], 2, 5, "pair has 2 results, not 1"),
    (["B[0], B[0] = pair(A[0])"], 2, 5, "one call writes a tile twice"),
    (["B[0] = scale(A[0], wrong=True)"], 2, 12, "got an unexpected keyword argument 'wrong'"),
    (["B[0] = scale(A[0], A[1])"], 2, 24, "scale takes an integer as factor, not A[1]"),
    (["B[0] = scale(1, 2)"], 2, 18, "scale takes a tile as a, not 1"),
    (["for i in range(N):", "    for j in range(N):", "        B[i * j] = combine(A[0])"], 4, 15, "multiplies loop variables (i, j)"),
    (["for i in range(N):", "    B[N // i] = combine(A[0])"], 3, 11, "divides by a loop variable"),
    (
        ["for i in range(N):", "    for j in range(0, N, i):", "        B[i] = combine(A[j])"],
        3,
        30,
        "the step i depends on a loop variable",
    ),
    (["for i in range(0, N, 0):", "    B[i] = combine(A[i])"], 2, 26, "the step is 0"),
    (["for i in [1, 2]:", "    B[i] = combine(A[i])"], 2, 5, "a loop runs over range, not [1, 2]"),
    (["for N in range(3):", "    B[0] = combine(A[0])"], 2, 9, "N is assigned a second time"),
    (["k = 1", "k = 2", "B[k] = combine(A[k])"], 3, 5, "k is assigned a second time"),
    (["k = combine(A[0])", "B[0] = combine(A[0])"], 2, 5, "the result of a kernel goes into a tile"),
    (["if A[0]:", "    B[0] = combine(A[0])"], 2, 8, "A[0] is no condition"),
    (["if A[0] > 0:", "    B[0] = combine(A[0])"], 2, 8, "A[0] is no integer expression"),
    (["while N:", "    B[0] = combine(A[0])"], 2, 5, "'while N:' is no statement of the language"),
    (["print(N)"], 2, 5, "is no statement of the language"),
    (["B[0] = combine(A[0])", "B[1, 0] = combine(A[0])"], 3, 5, "B has 1 indices elsewhere, and 2 here"),
    (["B[2**-1] = combine(A[0])"], 2, 7, "the exponent of 2 ** (-1) is negative"),
    (["B[N**2] = combine(A[0])"], 2, 7, "the base of N ** 2 is no constant"),
    (["B[0] = combine(A[len(N)])"], 2, 22, "len is no function of integers"),
    (["B[0] = combine(A[0]"], 2, 19, "no valid Python"),
]


@pytest.mark.parametrize(("lines", "line", "column", "problem"), REFUSED, ids=lambda v: str(v)[:40])
def test_refused_with_line_and_column(lines, line, column, problem):
    with pytest.raises(ProgramError) as caught:
        parse_text(body(*lines), KERNELS, file="p.py", first_line=11)
    assert problem in str(caught.value)
    assert caught.value.location == f"p.py:{line + 10}:{column}"


def test_signatures():
    with pytest.raises(ProgramError, match="x is annotated with int"):
        parse_text("def f(A: Input, x: int):\n    pass\n", KERNELS)
    with pytest.raises(ProgramError, match="matrix T is never used"):
        parse_text("def f(A: Input, T: Temporary, B: Output):\n    B[0] = combine(A[0])\n", KERNELS)
    with pytest.raises(ProgramError, match="calls no kernel"):
        parse_text("def f(N: Size):\n    k = N\n", KERNELS)


def test_the_decorator_points_at_the_file():
    with pytest.raises(ProgramError, match=r"B\[i \+ 1\] is B\[1\] at N = 1, i = 0: outside B, which has 1 tiles") as caught:

        @lambdapack
        def outside(A: Input, B: Output, N: Size) -> None:
            tiles(B, N)
            for i in range(N):
                B[i + 1] = combine(A[i])

    file, line, column = caught.value.location.rsplit(":", 2)
    source = open(__file__).read().splitlines()[int(line) - 1]  # noqa: SIM115
    assert file == __file__
    assert source[int(column) - 1 :].startswith("B[i + 1] = combine")
    with pytest.raises(ProgramError, match="T\\[i\\] reads T\\[0\\] at N = 1, i = 0, which is not written before"):

        @lambdapack
        def late(A: Input, T: Temporary, B: Output, N: Size) -> None:
            for i in range(N):
                B[i] = scale(T[i])
                T[i], B[i + N] = pair(A[i])


def test_sizes_are_checked():
    for sizes in ({}, {"N": 0}, {"N": True}, {"N": 2, "M": 1}):
        with pytest.raises(JobError, match="size"):
            cholesky.check_sizes(sizes)


def test_compressed_graph_of_cholesky():
    edges = {(e.source, e.target) for e in compressed_edges(cholesky)}
    factor, later, panel, gram, panels, grams, update, updates = cholesky.calls
    assert edges == {
        (factor, panel),
        (later, panels),
        (panel, gram),
        (panels, grams),
        (panel, update),
        (panels, updates),
        (gram, later),
        (grams, later),
        (gram, grams),
        (grams, grams),
        (update, panels),
        (updates, panels),
        (update, updates),
        (updates, updates),
    }
    text = compressed_text(cholesky)
    assert f"→ {updates} through S[i, j, k]" in text
    assert "S[i + 1, j, k] = multiply_subtract(" in text


def test_pictures():
    picture = ElementTree.fromstring(compressed_svg(qr))
    titles = [t.text for t in picture.iter("{http://www.w3.org/2000/svg}title")]
    assert len(titles) == len(compressed_edges(qr))
    unrolled = unrolled_svg(cholesky, {"N": 4})
    assert len(re.findall("<circle", unrolled)) == 20
    assert len(re.findall("<line", unrolled)) == sum(
        len(UnrolledGraph(cholesky, {"N": 4}).downstream(n)) for n in UnrolledGraph(cholesky, {"N": 4}).nodes
    )
    with pytest.raises(JobError, match="1,353,400 tasks at these sizes"):
        unrolled_svg(cholesky, {"N": 200})
