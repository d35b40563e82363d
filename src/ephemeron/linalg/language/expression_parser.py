"""From Python's syntax tree to expressions and conditions, with the rule that keeps dependencies solvable.

The rule: with values for what stands in exponents and under `ceil_log2`, every expression is affine in the loop variables.
Such quantities take few values (a tree over N tiles has ceil_log2(N) levels), so they can be enumerated; the rest is a system
of linear equations over integers.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ephemeron.errors import ProgramError
from ephemeron.linalg.language.expressions import Comparison, Condition, Constant, Expression, Logical, Name, Operation
from ephemeron.linalg.language.program import Location

_OPERATORS: dict[type[ast.operator], str] = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "//", ast.Mod: "%", ast.Pow: "**"}
_COMPARATORS: dict[type[ast.cmpop], str] = {ast.Eq: "==", ast.NotEq: "!=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
_FUNCTIONS = {"ceil_log2": (1, 1), "min": (2, 9), "max": (2, 9)}


@dataclass(frozen=True, slots=True)
class Scalars:
    """Names of integers in sight: each with the loop variables that its value depends on, and how."""

    free: Mapping[str, frozenset[str]]
    """Loop variables on which the value depends other than through exponents and `ceil_log2`."""


@dataclass(frozen=True)
class ExpressionParser:
    """Parses expressions of one program.

    Args:
        locate: the place of a syntax node in the source.
        kind_of: what a name that is no integer is ("a matrix", "a kernel", …), or None where it is not defined.
    """

    locate: Callable[[ast.AST], Location]
    kind_of: Callable[[str], str | None]

    def expression(self, node: ast.AST, scalars: Scalars) -> Expression:
        """An integer expression.

        Raises:
            ProgramError: it is none, or it is not affine.
        """
        if isinstance(node, ast.Constant):
            if type(node.value) is not int:
                raise self.error(node, f"{node.value!r} is no integer", "indices, bounds and conditions are integers")
            return Constant(node.value)
        if isinstance(node, ast.Name):
            return self._name(node, scalars)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self.expression(node.operand, scalars)
            return Constant(-inner.value) if isinstance(inner, Constant) else Operation("-", (Constant(0), inner))
        if isinstance(node, ast.BinOp):
            return self._binary(node, scalars)
        if isinstance(node, ast.Call):
            return self._function(node, scalars)
        raise self.error(node, f"{ast.unparse(node)} is no integer expression", "use + - * // % **, ceil_log2, min, max")

    def condition(self, node: ast.AST, scalars: Scalars) -> Condition:
        """A condition over integers; a chain `a < b < c` is the conjunction of its parts.

        Raises:
            ProgramError: it is none.
        """
        if isinstance(node, ast.Compare):
            sides = [self.expression(n, scalars) for n in (node.left, *node.comparators)]
            parts = []
            for operator, left, right in zip(node.ops, sides, sides[1:], strict=False):
                if type(operator) not in _COMPARATORS:
                    raise self.error(node, f"{ast.unparse(node)} is no comparison of integers", "use == != < <= > >=")
                parts.append(Comparison(_COMPARATORS[type(operator)], left, right))
            return parts[0] if len(parts) == 1 else Logical("and", tuple(parts))
        if isinstance(node, ast.BoolOp):
            joined = "and" if isinstance(node.op, ast.And) else "or"
            return Logical(joined, tuple(self.condition(v, scalars) for v in node.values))
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return Logical("not", (self.condition(node.operand, scalars),))
        raise self.error(node, f"{ast.unparse(node)} is no condition", "compare sizes and loop variables; values of tiles cannot decide")

    def error(self, node: ast.AST, problem: str, remedy: str | None = None) -> ProgramError:
        """An error at `node`."""
        return ProgramError(problem, location=self.locate(node), remedy=remedy)

    def _name(self, node: ast.Name, scalars: Scalars) -> Name:
        if node.id not in scalars.free:
            kind = self.kind_of(node.id)
            problem = f"{node.id} is {kind}, where an integer is needed" if kind else f"{node.id} is not defined here"
            raise self.error(node, problem, f"integers here: {', '.join(scalars.free) or 'none'}")
        return Name(node.id)

    def _binary(self, node: ast.BinOp, scalars: Scalars) -> Expression:
        operator = _OPERATORS.get(type(node.op))
        if operator is None:
            remedy = "use // for division" if isinstance(node.op, ast.Div) else "use + - * // % **"
            raise self.error(node, f"{ast.unparse(node)} is no integer expression", remedy)
        left, right = self.expression(node.left, scalars), self.expression(node.right, scalars)
        text = ast.unparse(node)
        if operator == "*" and free_variables(left, scalars) and free_variables(right, scalars):
            names = sorted(free_variables(left, scalars) | free_variables(right, scalars))
            raise self.error(node, f"{text} multiplies loop variables ({', '.join(names)})", "indices must be affine")
        if operator in ("//", "%") and free_variables(right, scalars):
            raise self.error(node, f"{text} divides by a loop variable", "divide by a constant, sizes or a power of two")
        if operator in ("//", "%") and isinstance(right, Constant) and right.value < 1:
            raise self.error(node, f"{text} divides by {right}", "divisors are positive")
        if operator == "**" and not (isinstance(left, Constant) and left.value >= 2):
            raise self.error(node, f"the base of {text} is no constant of at least 2")
        if operator == "**" and isinstance(right, Constant) and right.value < 0:
            raise self.error(node, f"the exponent of {text} is negative")
        return Operation(operator, (left, right))

    def _function(self, node: ast.Call, scalars: Scalars) -> Expression:
        name = node.func.id if isinstance(node.func, ast.Name) else ast.unparse(node.func)
        if name not in _FUNCTIONS:
            raise self.error(node, f"{name} is no function of integers", "those are ceil_log2, min and max")
        least, most = _FUNCTIONS[name]
        if node.keywords or not least <= len(node.args) <= most:
            raise self.error(node, f"{name} takes {'one argument' if most == 1 else 'two or more arguments'}")
        return Operation(name, tuple(self.expression(a, scalars) for a in node.args))


def free_variables(expression: Expression, scalars: Scalars) -> frozenset[str]:
    """Loop variables in `expression` outside exponents and `ceil_log2`."""
    if isinstance(expression, Name):
        return scalars.free[expression.name]
    if isinstance(expression, Operation) and expression.operator not in ("**", "ceil_log2"):
        return frozenset[str]().union(*(free_variables(o, scalars) for o in expression.operands))
    return frozenset()
