"""Integer expressions and conditions of LAmbdaPACK programs.

Every expression is a function of sizes and loop variables only, never of matrix values: so tile indices, bounds and
conditions are known before anything is computed, and dependencies can be derived from the text (survey 2.4).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True, slots=True)
class Constant:
    """An integer."""

    value: int

    def __str__(self) -> str:
        return str(self.value)


@dataclass(frozen=True, slots=True)
class Name:
    """A size, a loop variable or an assigned scalar."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Operation:
    """An operator applied to integer operands.

    `+` and `*` take two or more operands; `-` two (a negation is `0 - x`, printed `-x`); `//` and `%` a dividend and a
    positive divisor, rounded towards minus infinity; `**` the base 2 or another positive constant, and an exponent that
    must not be negative; `ceil_log2` one (the least d ≥ 0 with 2**d ≥ x, for x ≥ 1; 0 for x < 1); `min` and `max` two or more.
    """

    operator: str
    operands: tuple[Expression, ...]

    def __str__(self) -> str:
        return _printed(self)


Expression = Constant | Name | Operation


@dataclass(frozen=True, slots=True)
class Comparison:
    """`left operator right`, where the operator is one of `==`, `!=`, `<`, `<=`, `>`, `>=`."""

    operator: str
    left: Expression
    right: Expression

    def __str__(self) -> str:
        return f"{self.left} {self.operator} {self.right}"


@dataclass(frozen=True, slots=True)
class Logical:
    """`and` or `or` of two or more conditions, or `not` of one."""

    operator: str
    operands: tuple[Condition, ...]

    def __str__(self) -> str:
        parts = [f"({c})" if isinstance(c, Logical) else str(c) for c in self.operands]
        return f"not ({self.operands[0]})" if self.operator == "not" else f" {self.operator} ".join(parts)


Condition = Comparison | Logical

_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "//": 2, "%": 2, "**": 3}


def _printed(operation: Operation) -> str:
    operator, operands = operation.operator, operation.operands
    if operator not in _PRECEDENCE:
        return f"{operator}({', '.join(map(str, operands))})"
    level = _PRECEDENCE[operator]

    def part(expression: Expression, *, tight: bool) -> str:
        inner = _PRECEDENCE.get(expression.operator, 4) if isinstance(expression, Operation) else 4
        negative = isinstance(expression, Constant) and expression.value < 0
        if inner < level or (tight and (inner == level or negative)):
            return f"({expression})"
        return str(expression)

    first, *others = operands
    if operator == "-" and first == Constant(0):
        return f"-{part(others[0], tight=True)}"
    between = operator if operator == "**" else f" {operator} "
    # a power groups to the right, everything else to the left
    return between.join([part(first, tight=operator == "**"), *(part(o, tight=operator != "**") for o in others)])


def ceil_log2(value: int) -> int:
    """The least d ≥ 0 with 2**d ≥ `value`: the depth of a binary tree over `value` leaves."""
    return max(value - 1, 0).bit_length()


_EVALUATED: dict[str, Callable[[list[int]], int]] = {
    "+": sum,
    "-": lambda v: v[0] - v[1],
    "*": prod,
    "//": lambda v: v[0] // v[1],
    "%": lambda v: v[0] % v[1],
    "**": lambda v: int(v[0] ** v[1]),
    "ceil_log2": lambda v: ceil_log2(v[0]),
    "min": min,
    "max": max,
}
_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}


def evaluate(expression: Expression, values: Mapping[str, int]) -> int:
    """The value of `expression` where names have `values`.

    Raises:
        ArithmeticError: a divisor that is not positive, or a negative exponent.
    """
    if isinstance(expression, Constant):
        return expression.value
    if isinstance(expression, Name):
        return values[expression.name]
    operands = [evaluate(o, values) for o in expression.operands]
    if expression.operator in ("//", "%") and operands[1] <= 0:
        raise ArithmeticError(f"the divisor of {expression} is {operands[1]}")
    if expression.operator == "**" and operands[1] < 0:
        raise ArithmeticError(f"the exponent of {expression} is {operands[1]}")
    return _EVALUATED[expression.operator](operands)


def holds(condition: Condition, values: Mapping[str, int]) -> bool:
    """Whether `condition` is true where names have `values`."""
    if isinstance(condition, Comparison):
        return _COMPARED[condition.operator](evaluate(condition.left, values), evaluate(condition.right, values))
    if condition.operator == "not":
        return not holds(condition.operands[0], values)
    return (all if condition.operator == "and" else any)(holds(c, values) for c in condition.operands)


def names_in(expression: Expression | Condition) -> Iterator[str]:
    """Every name in `expression`, in the order of the text, repeated where it is."""
    if isinstance(expression, Name):
        yield expression.name
    elif isinstance(expression, Comparison):
        yield from names_in(expression.left)
        yield from names_in(expression.right)
    elif isinstance(expression, Operation | Logical):
        for operand in expression.operands:
            yield from names_in(operand)
