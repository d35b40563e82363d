"""Questions about a system: its solutions one by one, whether there are any, how many."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ephemeron.linalg.analysis.branching import affine_cases
from ephemeron.linalg.analysis.counting import number_of_points
from ephemeron.linalg.analysis.lattice import parametrised
from ephemeron.linalg.analysis.linear import Linear
from ephemeron.linalg.analysis.polytope import points, rows_of
from ephemeron.linalg.analysis.propagation import Infeasible, Steps
from ephemeron.linalg.analysis.system import System


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
