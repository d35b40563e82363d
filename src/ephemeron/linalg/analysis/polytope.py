"""Integer points of affine inequalities, by elimination of one variable after another (Fourier and Motzkin).

The shadow of a polytope bounds the outer variables, so enumeration costs time in proportion to the points that it finds, except where
a shadow has integer points without an integer point above them (coefficients other than ±1), which costs the tries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import gcd

from ephemeron.errors import EphemeronError
from ephemeron.linalg.analysis.linear import Linear
from ephemeron.linalg.analysis.propagation import Infeasible, Steps

Rows = dict[tuple[int, ...], int]
"""Inequalities `coefficients · x + constant >= 0`: the constant by coefficients, which have no common divisor."""


def rows_of(inequalities: Iterable[Linear], parameters: list[int]) -> Rows:
    """Inequalities over `parameters`, in their order, without repetition.

    Raises:
        Infeasible: one without parameters is false, or two exclude each other.
    """
    rows: Rows = {}
    for form in inequalities:
        add_row(rows, tuple(form.coefficients.get(p, 0) for p in parameters), form.constant)
    return rows


def add_row(rows: Rows, coefficients: tuple[int, ...], constant: int) -> None:
    """Add an inequality, tightened to integers.

    Raises:
        Infeasible: it is false, or excludes one of `rows`.
    """
    divisor = gcd(*coefficients) if coefficients else 0
    if divisor == 0:
        if constant < 0:
            raise Infeasible
        return
    if divisor > 1:
        coefficients, constant = tuple(a // divisor for a in coefficients), constant // divisor
    known = rows.get(coefficients)
    if known is not None and known <= constant:
        return
    rows[coefficients] = constant
    opposite = rows.get(tuple(-a for a in coefficients))
    if opposite is not None and opposite + constant < 0:
        raise Infeasible


def eliminated(rows: Rows, place: int, steps: Steps) -> Rows:
    """The shadow of `rows` along the variable at `place`, over the rationals.

    Raises:
        Infeasible: the shadow is empty.
    """
    shadow: Rows = {}
    lower: list[tuple[tuple[int, ...], int]] = []
    upper: list[tuple[tuple[int, ...], int]] = []
    for coefficients, constant in rows.items():
        a = coefficients[place]
        if a == 0:
            add_row(shadow, coefficients, constant)
        else:
            (lower if a > 0 else upper).append((coefficients, constant))
    for low, low_constant in lower:
        for high, high_constant in upper:
            steps.taken += 1
            a, b = low[place], -high[place]
            both = tuple(b * x + a * y for x, y in zip(low, high, strict=True))
            add_row(shadow, both, b * low_constant + a * high_constant)
    return shadow


def elimination_cost(rows: Rows, place: int) -> int:
    """How many inequalities the elimination of a variable adds at most."""
    signs = [c[place] for c in rows if c[place]]
    lower = sum(1 for a in signs if a > 0)
    upper = len(signs) - lower
    return lower * upper - lower - upper


def points(rows: Rows, dimension: int, steps: Steps) -> Iterator[tuple[int, ...]]:
    """Every integer point, once, produced as it is consumed.

    Raises:
        EphemeronError: there are infinitely many.
    """
    chain: list[tuple[int, Rows]] = []
    left = list(range(dimension))
    try:
        while left:
            place = min(left, key=lambda p: (elimination_cost(rows, p), -p))
            chain.append((place, rows))
            rows = eliminated(rows, place, steps)
            left.remove(place)
    except Infeasible:
        return
    chain.reverse()
    values = [0] * dimension

    def extend(depth: int) -> Iterator[tuple[int, ...]]:
        if depth == len(chain):
            yield tuple(values)
            return
        place, rows = chain[depth]
        low, high = bounds(rows, place, values, {p for p, _ in chain[:depth]})
        for value in range(low, high + 1):
            steps.taken += 1
            values[place] = value
            yield from extend(depth + 1)

    yield from extend(0)


def bounds(rows: Rows, place: int, values: list[int], known: set[int]) -> tuple[int, int]:
    """Least and greatest value of the variable at `place` where the variables at `known` have `values`."""
    low: int | None = None
    high: int | None = None
    for coefficients, constant in rows.items():
        a = coefficients[place]
        if a == 0:
            continue
        rest = constant + sum(coefficients[p] * values[p] for p in known)
        if a > 0:
            low = -(rest // a) if low is None else max(low, -(rest // a))
        else:
            high = rest // -a if high is None else min(high, rest // -a)
    if low is None or high is None:
        raise EphemeronError("a loop has no bounds")
    return low, high
