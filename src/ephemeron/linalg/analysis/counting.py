"""Number of integer points of affine inequalities, in closed form: sums of polynomials between affine bounds.

A variable whose coefficients are all ±1 is summed symbolically: where one lower and one upper bound are the tightest, the sum of a
polynomial from one to the other is a polynomial again (Faulhaber). Other variables are summed value by value; in programs their
range is a tree's number of levels, or a constant. The cost does not depend on the length of a loop.

Integer points of affine inequalities, by elimination of one variable after another (Fourier and Motzkin).

The shadow of a polytope bounds the outer variables, so enumeration costs time in proportion to the points that it finds, except where
a shadow has integer points without an integer point above them (coefficients other than ±1), which costs the tries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from fractions import Fraction
from functools import lru_cache
from math import comb, gcd

from ephemeron.errors import EphemeronError
from ephemeron.linalg.analysis.propagation import Infeasible, Steps
from ephemeron.linalg.analysis.system import Linear

Monomial = tuple[int, ...]
Polynomial = dict[Monomial, Fraction]
"""Coefficients by exponents of the variables."""


def number_of_points(rows: Rows, dimension: int, steps: Steps) -> int:
    """How many integer points satisfy `rows`.

    Raises:
        EphemeronError: there are infinitely many.
    """
    total = _sum(dict(rows), list(range(dimension)), {(0,) * dimension: Fraction(1)}, steps)
    assert total.denominator == 1
    return int(total)


def _sum(rows: Rows, left: list[int], summand: Polynomial, steps: Steps) -> Fraction:
    """The sum of `summand` over the integer points of `rows` in the variables at `left`; no other one has a coefficient."""
    if not left:
        return sum(summand.values(), Fraction(0))
    try:
        rows = _irredundant(rows, left, steps)
    except Infeasible:
        return Fraction(0)
    exact = [p for p in left if all(abs(c[p]) <= 1 for c in rows)]
    if not exact:
        return _one_by_one(rows, left, summand, steps)
    place = min(exact, key=lambda p: (elimination_cost(rows, p), -p))
    others = [p for p in left if p != place]
    total = Fraction(0)
    for case, low, high in _tightest(rows, place):
        steps.taken += 1
        inner = _summed(summand, place, low, high)
        total += _sum(case, others, inner, steps)
    return total


def _tightest(rows: Rows, place: int) -> Iterator[tuple[Rows, Polynomial, Polynomial]]:
    """Disjoint cases by which bounds of a variable are the tightest: what the others satisfy, and the two bounds.

    Bounds are affine forms, as polynomials in the other variables.
    """
    lower = [(c, k) for c, k in rows.items() if c[place] > 0]
    upper = [(c, k) for c, k in rows.items() if c[place] < 0]
    rest = {c: k for c, k in rows.items() if c[place] == 0}
    for i, low in enumerate(lower):
        for j, high in enumerate(upper):
            case = dict(rest)
            try:
                for k, other in enumerate(lower):  # low >= other: its negated rest is at least the other's
                    if k != i:
                        _add_difference(case, other, low, 1 if k < i else 0)
                for k, other in enumerate(upper):
                    if k != j:
                        _add_difference(case, other, high, 1 if k < j else 0)
                _add_sum(case, low, high)
            except Infeasible:
                continue
            yield case, _affine(low, place, -1), _affine(high, place, 1)


Row = tuple[tuple[int, ...], int]


def _add_difference(case: Rows, first: Row, second: Row, strictly: int) -> None:
    """`first - second >= strictly`."""
    add_row(case, tuple(a - b for a, b in zip(first[0], second[0], strict=True)), first[1] - second[1] - strictly)


def _add_sum(case: Rows, first: Row, second: Row) -> None:
    """`first + second >= 0`."""
    add_row(case, tuple(a + b for a, b in zip(first[0], second[0], strict=True)), first[1] + second[1])


def _affine(row: Row, place: int, sign: int) -> Polynomial:
    coefficients, constant = row
    zero = (0,) * len(coefficients)
    made = {zero: Fraction(sign * constant)}
    for p, a in enumerate(coefficients):
        if a and p != place:
            made[tuple(int(k == p) for k in range(len(zero)))] = Fraction(sign * a)
    return made


def _one_by_one(rows: Rows, left: list[int], summand: Polynomial, steps: Steps) -> Fraction:
    """Sum over each value of the variable with the shortest range."""
    ranges = []
    for place in left:
        shadow = dict(rows)
        try:
            for p in left:
                if p != place:
                    shadow = eliminated(shadow, p, steps)
        except Infeasible:
            return Fraction(0)
        low, high = bounds(shadow, place, [], set())
        ranges.append((high - low, place, low, high))
    _, place, low, high = min(ranges)
    others = [p for p in left if p != place]
    total = Fraction(0)
    for value in range(low, high + 1):
        steps.taken += 1
        case: Rows = {}
        try:
            for c, k in rows.items():
                add_row(case, (*c[:place], 0, *c[place + 1 :]), k + c[place] * value)
        except Infeasible:
            continue
        total += _sum(case, others, _evaluated(summand, place, value), steps)
    return total


def _evaluated(polynomial: Polynomial, place: int, value: int) -> Polynomial:
    made: Polynomial = {}
    for monomial, a in polynomial.items():
        rest = (*monomial[:place], 0, *monomial[place + 1 :])
        made[rest] = made.get(rest, Fraction(0)) + a * value ** monomial[place]
    return made


def _irredundant(rows: Rows, left: list[int], steps: Steps) -> Rows:
    """`rows` without those that the others imply, over the rationals.

    Raises:
        Infeasible: no rational point satisfies them.
    """
    _check_feasible(rows, left, steps)
    kept = dict(rows)
    for coefficients, constant in rows.items():
        if len(kept) <= 2:
            break
        del kept[coefficients]
        trial = dict(kept)
        try:
            add_row(trial, tuple(-a for a in coefficients), -constant - 1)
            _check_feasible(trial, left, steps)
        except Infeasible:
            continue
        kept[coefficients] = constant
    return kept


def _check_feasible(rows: Rows, left: list[int], steps: Steps) -> None:
    remaining = list(left)
    while remaining:
        place = min(remaining, key=lambda p: elimination_cost(rows, p))
        rows = eliminated(rows, place, steps)
        remaining.remove(place)


@lru_cache(maxsize=64)
def _power_sum(exponent: int) -> tuple[Fraction, ...]:
    """Coefficients, by power of n, of the polynomial that is the sum of k**exponent for k from 0 to n."""
    made = [Fraction(0)] * (exponent + 2)
    for k in range(exponent + 1):
        made[exponent + 1 - k] += Fraction(comb(exponent + 1, k)) * _bernoulli(k) / (exponent + 1)
    if exponent == 0:
        made[0] += 1  # 0**0
    return tuple(made)


@lru_cache(maxsize=64)
def _bernoulli(n: int) -> Fraction:
    """Bernoulli numbers with B(1) = +1/2."""
    if n == 0:
        return Fraction(1)
    if n == 1:
        return Fraction(1, 2)
    minus = {0: Fraction(1), 1: Fraction(-1, 2)}
    for m in range(2, n + 1):
        minus[m] = -sum((Fraction(comb(m + 1, k)) * minus[k] for k in range(m)), Fraction(0)) / (m + 1)
    return minus[n]


def _summed(summand: Polynomial, place: int, low: Polynomial, high: Polynomial) -> Polynomial:
    """The sum of `summand` over the variable at `place` from `low` to `high`, where `high >= low - 1`."""
    below = dict(low)
    zero = (0,) * len(next(iter(summand)))
    below[zero] = below.get(zero, Fraction(0)) - 1
    total: Polynomial = {}
    for monomial, a in summand.items():
        rest = (*monomial[:place], 0, *monomial[place + 1 :])
        for sign, end in ((1, high), (-1, below)):
            power: Polynomial = {rest: a * sign}
            for k, b in enumerate(_power_sum(monomial[place])):
                if k:
                    power = _times(power, end)
                if b:
                    for m, x in power.items():
                        total[m] = total.get(m, Fraction(0)) + b * x
    return {m: x for m, x in total.items() if x} or {zero: Fraction(0)}


def _times(first: Polynomial, second: Polynomial) -> Polynomial:
    made: Polynomial = {}
    for m, a in first.items():
        for n, b in second.items():
            both = tuple(x + y for x, y in zip(m, n, strict=True))
            made[both] = made.get(both, Fraction(0)) + a * b
    return made


# -- integer points of affine inequalities ------------------------------------------------------------------------


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
