"""Integer solutions of affine equations: substitution where a coefficient is ±1, Euclid's algorithm where none is.

Every substitution is unimodular, so the solutions of the equations are exactly the integer points of the remaining parameters.
"""

from __future__ import annotations

from collections.abc import Sequence

from ephemeron.linalg.analysis.linear import Linear, combination, variable
from ephemeron.linalg.analysis.propagation import Infeasible, Steps
from ephemeron.linalg.analysis.system import System


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
