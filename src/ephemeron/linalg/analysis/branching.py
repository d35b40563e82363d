"""From a system with definitions to systems that are affine: by cases for the few values of exponents and logarithms."""

from __future__ import annotations

from collections.abc import Iterator

from ephemeron.errors import EphemeronError
from ephemeron.linalg.analysis.linear import Linear
from ephemeron.linalg.analysis.propagation import Infeasible, Steps, fixed, interval, propagate
from ephemeron.linalg.analysis.system import Definition, System


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
