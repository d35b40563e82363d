"""Affine forms over integer variables: `sum(coefficient * variable) + constant`, with variables numbered from 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd


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
