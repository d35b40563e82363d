"""Questions about a system: its solutions one by one, whether there are any, how many.

Integer solutions of affine equations: substitution where a coefficient is ±1, Euclid's algorithm where none is.

Every substitution is unimodular, so the solutions of the equations are exactly the integer points of the remaining parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ephemeron.errors import EphemeronError
from ephemeron.linalg.analysis.counting import number_of_points, points, rows_of
from ephemeron.linalg.analysis.propagation import Infeasible, Steps, fixed, interval, propagate
from ephemeron.linalg.analysis.system import Definition, Linear, System, combination, variable


def solutions(system: System, wanted: Sequence[Linear], steps: Steps) -> Iterator[tuple[int, ...]]:
    """Values of the `wanted` forms at every solution of `system`, which is changed; produced as they are consumed."""
    for case in affine_cases(system, steps):
        try:
            forms, inequalities, free = parametrised(case, wanted, steps)
            rows = rows_of(inequalities, free)
        except Infeasible:
            continue
        place = {number: k for k, number in enumerate(free)}
        terms = [(f.constant, [(place[v], a) for v, a in f.coefficients.items()]) for f in forms]
        for point in points(rows, len(free), steps):
            yield tuple(constant + sum(a * point[k] for k, a in parts) for constant, parts in terms)


def first_solution(system: System, wanted: Sequence[Linear], steps: Steps) -> tuple[int, ...] | None:
    """Values of the `wanted` forms at one solution; None where `system` has none."""
    return next(solutions(system, wanted, steps), None)


def number_of_solutions(system: System, steps: Steps) -> int:
    """How many solutions `system` has; it is changed."""
    total = 0
    for case in affine_cases(system, steps):
        try:
            _, inequalities, free = parametrised(case, (), steps)
            rows = rows_of(inequalities, free)
        except Infeasible:
            continue
        total += number_of_points(rows, len(free), steps)
    return total


# -- integer solutions of affine equations ------------------------------------------------------------------------


def parametrised(system: System, wanted: Sequence[Linear], steps: Steps) -> tuple[list[Linear], list[Linear], list[int]]:
    """`wanted` forms and all inequalities over free parameters, after elimination of fixed variables and equations.

    Args:
        system: affine (without definitions).
        wanted: forms over its variables.
        steps: counter.

    Returns:
        The wanted forms, the inequalities (forms that are at least zero), and the numbers of the parameters in them.

    Raises:
        Infeasible: the equations have no integer solution.
    """
    forms = [*wanted, *system.inequalities]
    equations = list(system.equations)
    for number, (low, high) in enumerate(zip(system.low, system.high, strict=True)):
        if low is not None and low == high:
            value = Linear({}, low)
            forms = [f.substitute(number, value) for f in forms]
            equations = [e.substitute(number, value) for e in equations]
        else:
            if low is not None:
                forms.append(Linear({number: 1}, -low))
            if high is not None:
                forms.append(Linear({number: -1}, high))
    following = len(system.low)
    while equations:
        steps.taken += 1
        equation = equations.pop()
        divisor = equation.divisor()
        if divisor == 0 and equation.constant == 0:
            continue
        if divisor == 0 or equation.constant % divisor:
            raise Infeasible
        equation = Linear({v: a // divisor for v, a in equation.coefficients.items()}, equation.constant // divisor)
        number = min(equation.coefficients, key=lambda v: (abs(equation.coefficients[v]), -v))
        leading = equation.coefficients[number]
        if abs(leading) == 1:
            rest = Linear({v: a for v, a in equation.coefficients.items() if v != number}, equation.constant)
            value = rest * -leading
        else:
            quotients = {v: a // leading for v, a in equation.coefficients.items() if v != number}
            value = combination(variable(following), -1, Linear({v: q for v, q in quotients.items() if q}))
            equations.append(equation.substitute(number, value))
            following += 1
        forms = [f.substitute(number, value) for f in forms]
        equations = [e.substitute(number, value) for e in equations]
    inequalities = forms[len(wanted) :]
    free = sorted({v for form in forms for v in form.coefficients})
    return forms[: len(wanted)], inequalities, free


# -- from a system with definitions to systems that are affine ----------------------------------------------------


def affine_cases(system: System, steps: Steps) -> Iterator[System]:
    """Affine systems with disjoint solutions whose union is that of `system`; `system` is changed."""
    try:
        propagate(system, steps)
    except Infeasible:
        return
    system.definitions = [d for d in system.definitions if not _resolve(system, d)]
    if not system.definitions:
        yield system
        return
    extreme = next((d for d in system.definitions if d.kind in ("min", "max")), None)
    for equation, inequalities in _values(system) if extreme is None else _extremes(extreme):
        case = system.copy()
        case.equations.append(equation)
        case.inequalities += inequalities
        if extreme is not None:
            case.definitions.remove(extreme)
        yield from affine_cases(case, steps)


def _resolve(system: System, definition: Definition) -> bool:
    """Replace a definition by affine constraints where that is possible now."""
    out = Linear({definition.variable: 1})
    first = definition.arguments[0]
    if definition.kind in ("power", "ceil_log2"):
        # propagation has fixed the result where the argument is fixed; a fixed logarithm bounds its argument
        if definition.kind == "power" and (exponent := fixed(system, first)) is not None:
            system.equations.append(out.plus(-int(definition.base**exponent)))
            return True
        if definition.kind == "ceil_log2" and (depth := fixed(system, out)) is not None:
            system.inequalities.append((first * -1).plus(2**depth))
            if depth:
                system.inequalities.append(first.plus(-(2 ** (depth - 1)) - 1))
            return True
        return False
    if definition.kind == "product":
        for known, other in (definition.arguments, definition.arguments[::-1]):
            if (value := fixed(system, known)) is not None:
                system.equations.append(out - other * value)
                return True
        return False
    if definition.kind == "quotient":
        divisor = fixed(system, definition.arguments[1])
        if divisor is None:
            return False
        rest = first - out * divisor
        system.inequalities += [rest, (rest * -1).plus(divisor - 1)]
        return True
    return False


def _values(system: System) -> Iterator[tuple[Linear, list[Linear]]]:
    """One case for each value of the exponent, logarithm, factor or divisor that has fewest."""
    choices: list[tuple[int, Linear, int, int]] = []
    for definition in system.definitions:
        branched = {
            "power": definition.arguments[:1],
            "ceil_log2": (Linear({definition.variable: 1}),),
            "product": definition.arguments,
            "quotient": definition.arguments[1:],
        }[definition.kind]
        for form in branched:
            low, high = interval(system, form)
            if low is not None and high is not None:
                later = 0 if definition.kind in ("power", "ceil_log2") else 1 << 40
                choices.append((later + high - low, form, low, high))
    if not choices:
        raise EphemeronError("an exponent, a logarithm or a divisor has no bounds: the loops around it have none")
    _, form, low, high = min(choices, key=lambda c: c[0])
    for value in range(low, high + 1):
        yield form.plus(-value), []


def _extremes(definition: Definition) -> Iterator[tuple[Linear, list[Linear]]]:
    """One case for each argument of a minimum or maximum: the first of those that are extreme."""
    out = Linear({definition.variable: 1})
    sign = 1 if definition.kind == "min" else -1
    for place, argument in enumerate(definition.arguments):
        others = [((other - argument) * sign).plus(-1 if k < place else 0) for k, other in enumerate(definition.arguments) if k != place]
        yield out - argument, others
