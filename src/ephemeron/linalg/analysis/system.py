"""Systems of constraints over integers: affine equations and inequalities, and definitions that are not affine.

A definition fixes one variable as a function of others: a power, a ceil_log2, a product, a quotient, a minimum. Its argument
takes few values (levels of a tree) or becomes affine once another variable is known; `solver` enumerates those few.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import gcd


@dataclass(frozen=True, slots=True)
class Definition:
    """`variable kind(arguments)`.

    Kinds: `power` (base ** first argument), `ceil_log2`, `product` (of two), `quotient` (first // second, the second
    positive), `min`, `max`.
    """

    kind: str
    variable: int
    arguments: tuple[Linear, ...]
    base: int = 2

    def shifted(self, by: int) -> Definition:
        """The same definition over variables whose numbers are greater by `by`."""
        return Definition(self.kind, self.variable + by, tuple(a.shifted(by) for a in self.arguments), self.base)


@dataclass(slots=True)
class System:
    """A conjunction of constraints; changed in place by propagation, so copied before each query."""

    low: list[int | None] = field(default_factory=list)
    """Least value of each variable; None: no bound known."""
    high: list[int | None] = field(default_factory=list)
    """Greatest value of each variable."""
    equations: list[Linear] = field(default_factory=list)
    """Forms that are zero."""
    inequalities: list[Linear] = field(default_factory=list)
    """Forms that are at least zero."""
    definitions: list[Definition] = field(default_factory=list)
    """Variables that are functions of others."""

    def new_variable(self, low: int | None = None, high: int | None = None) -> int:
        """The number of another variable."""
        self.low.append(low)
        self.high.append(high)
        return len(self.low) - 1

    def define(self, kind: str, *arguments: Linear, base: int = 2) -> Linear:
        """A new variable defined by `arguments`."""
        made = self.new_variable()
        self.definitions.append(Definition(kind, made, arguments, base))
        return variable(made)

    def quotient(self, dividend: Linear, divisor: int) -> Linear:
        """`dividend // divisor` for a positive constant: q with 0 ≤ dividend − divisor·q ≤ divisor − 1."""
        made = variable(self.new_variable())
        rest = dividend - made * divisor
        self.inequalities += [rest, (rest * -1).plus(divisor - 1)]
        return made

    def copy(self) -> System:
        """A system that can be changed without changing this one."""
        return System(list(self.low), list(self.high), list(self.equations), list(self.inequalities), list(self.definitions))

    def joined(self, other: System) -> tuple[System, int]:
        """Both systems over disjoint variables, and by how much the numbers of `other` grew."""
        by = len(self.low)
        made = System(
            self.low + other.low,
            self.high + other.high,
            self.equations + [e.shifted(by) for e in other.equations],
            self.inequalities + [e.shifted(by) for e in other.inequalities],
            self.definitions + [d.shifted(by) for d in other.definitions],
        )
        return made, by


# -- affine forms over integer variables --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Linear:
    """An affine form. Coefficients are never zero."""

    coefficients: Mapping[int, int]
    """By number of the variable."""
    constant: int = 0

    def __add__(self, other: Linear) -> Linear:
        return combination(self, 1, other)

    def __sub__(self, other: Linear) -> Linear:
        return combination(self, -1, other)

    def __mul__(self, factor: int) -> Linear:
        if factor == 0:
            return Linear({})
        return Linear({v: a * factor for v, a in self.coefficients.items()}, self.constant * factor)

    def plus(self, constant: int) -> Linear:
        """The form with `constant` added."""
        return Linear(self.coefficients, self.constant + constant)

    def shifted(self, by: int) -> Linear:
        """The same form over variables whose numbers are greater by `by`."""
        return Linear({v + by: a for v, a in self.coefficients.items()}, self.constant)

    def substitute(self, variable: int, form: Linear) -> Linear:
        """The form with `form` in place of `variable`."""
        factor = self.coefficients.get(variable)
        if factor is None:
            return self
        rest = Linear({v: a for v, a in self.coefficients.items() if v != variable}, self.constant)
        return combination(rest, factor, form)

    def divisor(self) -> int:
        """Greatest common divisor of the coefficients; 0 without any."""
        return gcd(*self.coefficients.values()) if self.coefficients else 0


def combination(first: Linear, factor: int, second: Linear) -> Linear:
    """`first + factor * second`."""
    coefficients = dict(first.coefficients)
    for variable, a in second.coefficients.items():
        total = coefficients.get(variable, 0) + factor * a
        if total:
            coefficients[variable] = total
        else:
            coefficients.pop(variable, None)
    return Linear(coefficients, first.constant + factor * second.constant)


def variable(number: int) -> Linear:
    """The form that is one variable."""
    return Linear({number: 1})
