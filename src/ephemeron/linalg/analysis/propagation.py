"""Bounds consistency: shrink every variable's interval as far as each single constraint allows.

Most queries end here: the indices of a tile fix the loop variables one after another. Rounds are bounded, because two
constraints can shrink an interval by one per round; what remains is left to the exact steps (`solver`, `counting`).
"""

from __future__ import annotations

from ephemeron.linalg.analysis.system import Definition, Linear, System
from ephemeron.linalg.language.expressions import ceil_log2

ROUNDS = 12
_LARGEST_EXPONENT = 256


class Infeasible(Exception):
    """No integers satisfy the constraints. Control flow inside `analysis`."""


class Steps:
    """A counter of elementary steps, so that tests can bound work without a clock."""

    def __init__(self) -> None:
        self.taken = 0


def propagate(system: System, steps: Steps) -> None:
    """Shrink the intervals of `system` in place.

    Raises:
        Infeasible: an interval became empty, or a constraint without variables is false.
    """
    for _ in range(ROUNDS):
        before = (tuple(system.low), tuple(system.high))
        for form in system.equations:
            steps.taken += 1
            _tighten(system, form)
            _tighten(system, form * -1)
        for form in system.inequalities:
            steps.taken += 1
            _tighten(system, form)
        for definition in system.definitions:
            steps.taken += 1
            _apply(system, definition)
        if (tuple(system.low), tuple(system.high)) == before:
            return


def interval(system: System, form: Linear) -> tuple[int | None, int | None]:
    """Bounds of an affine form over the intervals of `system`."""
    low: int | None = form.constant
    high: int | None = form.constant
    for v, a in form.coefficients.items():
        least, most = (system.low[v], system.high[v]) if a > 0 else (system.high[v], system.low[v])
        low = None if low is None or least is None else low + a * least
        high = None if high is None or most is None else high + a * most
    return low, high


def fixed(system: System, form: Linear) -> int | None:
    """The value of a form whose variables are all fixed, None otherwise."""
    low, high = interval(system, form)
    return low if low == high else None


def at_least(system: System, form: Linear, bound: int | None) -> None:
    """Add what `form >= bound` says about single variables."""
    if bound is not None:
        _tighten(system, form.plus(-bound))


def at_most(system: System, form: Linear, bound: int | None) -> None:
    """Add what `form <= bound` says about single variables."""
    if bound is not None:
        _tighten(system, (form * -1).plus(bound))


def _tighten(system: System, form: Linear) -> None:
    """`form >= 0`: bound each variable by the greatest values of the others."""
    low, high = system.low, system.high
    missing, total = 0, form.constant
    for v, a in form.coefficients.items():
        most = high[v] if a > 0 else low[v]
        if most is None:
            missing += 1
        else:
            total += a * most
    if missing == 0 and total < 0:
        raise Infeasible
    if missing > 1:
        return
    for v, a in form.coefficients.items():
        most = high[v] if a > 0 else low[v]
        if missing and most is not None:
            continue
        others = total if most is None else total - a * most
        if a > 0:
            bound = -(others // a)
            least = low[v]
            if least is None or bound > least:
                low[v] = bound
        else:
            bound = others // -a
            greatest = high[v]
            if greatest is None or bound < greatest:
                high[v] = bound
        least, greatest = low[v], high[v]
        if least is not None and greatest is not None and least > greatest:
            raise Infeasible


def _apply(system: System, definition: Definition) -> None:
    out = Linear({definition.variable: 1})
    if definition.kind == "power":
        _power(system, definition, out)
    elif definition.kind == "ceil_log2":
        _logarithm(system, definition.arguments[0], out)
    elif definition.kind == "product":
        _product(system, definition, out)
    elif definition.kind == "quotient":
        _quotient(system, definition, out)
    else:
        _extreme(system, definition, out)


def _power(system: System, definition: Definition, out: Linear) -> None:
    base, exponent = definition.base, definition.arguments[0]
    at_least(system, exponent, 0)
    low, high = interval(system, exponent)
    at_least(system, out, base ** min(max(low or 0, 0), _LARGEST_EXPONENT))
    if high is not None and high <= _LARGEST_EXPONENT:
        at_most(system, out, int(base**high))
    least, most = interval(system, out)
    if least is not None and least > 1:
        power = 0
        while base**power < least:
            power += 1
        at_least(system, exponent, power)
    if most is not None:
        power = 0
        while base ** (power + 1) <= most:
            power += 1
        at_most(system, exponent, power)


def _logarithm(system: System, argument: Linear, out: Linear) -> None:
    low, high = interval(system, argument)
    at_least(system, out, 0 if low is None else ceil_log2(low))
    if high is not None:
        at_most(system, out, ceil_log2(high))
    least, most = interval(system, out)
    if least is not None and least >= 1:
        at_least(system, argument, 2 ** (least - 1) + 1)
    if most is not None and most <= _LARGEST_EXPONENT:
        at_most(system, argument, 2**most)


def _product(system: System, definition: Definition, out: Linear) -> None:
    first, second = definition.arguments
    for known, other in ((first, second), (second, first)):
        if (value := fixed(system, known)) is not None:
            _tighten(system, out - other * value)
            _tighten(system, other * value - out)
            return
    ends = [x for form in (first, second) for x in interval(system, form)]
    if any(x is None for x in ends):
        return
    a, b, c, d = (x for x in ends if x is not None)
    corners = [a * c, a * d, b * c, b * d]
    at_least(system, out, min(corners))
    at_most(system, out, max(corners))


def _quotient(system: System, definition: Definition, out: Linear) -> None:
    dividend, divisor = definition.arguments
    at_least(system, divisor, 1)
    if (value := fixed(system, divisor)) is not None:
        rest = dividend - out * value
        _tighten(system, rest)
        _tighten(system, (rest * -1).plus(value - 1))


def _extreme(system: System, definition: Definition, out: Linear) -> None:
    sign = 1 if definition.kind == "min" else -1
    for argument in definition.arguments:  # min: out <= argument
        _tighten(system, (argument - out) * sign)
    ends = [interval(system, a)[0 if sign == 1 else 1] for a in definition.arguments]
    known = [e for e in ends if e is not None]
    if len(known) == len(ends):
        (at_least if sign == 1 else at_most)(system, out, min(known) if sign == 1 else max(known))
