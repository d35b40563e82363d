"""From a kernel call and the scopes around it to systems of constraints, one for each side of its conditions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from ephemeron.linalg.analysis.propagation import Infeasible, Steps, propagate
from ephemeron.linalg.analysis.system import Linear, System, variable
from ephemeron.linalg.language.expressions import Comparison, Condition, Constant, Expression, Logical, Name, ceil_log2
from ephemeron.linalg.language.program import Assign, Branch, For, KernelCall, Program, TileReference

_NEGATED = {"==": "!=", "!=": "==", "<": ">=", ">=": "<", ">": "<=", "<=": ">"}


@dataclass(frozen=True, slots=True)
class Access:
    """A tile that a statement reads or writes: its indices as affine forms over the variables of a `Domain`."""

    reference: TileReference
    """In the program."""
    indices: tuple[Linear, ...]
    """One form per index."""


@dataclass(frozen=True, slots=True)
class Domain:
    """Executions of one kernel call: the integer points of a system. The domains of a call are disjoint."""

    call: KernelCall
    """The kernel call."""
    system: System
    """Constraints on loop variables and on what is derived from them."""
    loops: tuple[Linear, ...]
    """Values of the loop variables, outermost first."""
    reads: tuple[Access, ...]
    """Tiles that are read."""
    writes: tuple[Access, ...]
    """Tiles that are written."""


def domains_of(program: Program, sizes: Mapping[str, int], steps: Steps) -> tuple[Domain, ...]:
    """The domains of every kernel call of `program` at `sizes`, in the order of the text; empty ones are left out."""
    return tuple(d for call in program.calls.values() for d in _domains(program, call, sizes, steps))


def disjoint_cases(condition: Condition, truth: bool = True) -> list[list[Comparison]]:
    """A condition, or its negation, as a disjoint union of conjunctions without `!=`."""
    if isinstance(condition, Comparison):
        operator = condition.operator if truth else _NEGATED[condition.operator]
        operators = ["<", ">"] if operator == "!=" else [operator]
        return [[Comparison(o, condition.left, condition.right)] for o in operators]
    if condition.operator == "not":
        return disjoint_cases(condition.operands[0], not truth)
    first, *others = condition.operands
    if not others:
        return disjoint_cases(first, truth)
    rest = Logical(condition.operator, tuple(others))
    if (condition.operator == "and") is truth:
        return [[*a, *b] for a in disjoint_cases(first, truth) for b in disjoint_cases(rest, truth)]
    # either the first decides, or it does not and the rest does
    return disjoint_cases(first, truth) + [[*a, *b] for a in disjoint_cases(first, not truth) for b in disjoint_cases(rest, truth)]


def _domains(program: Program, call: KernelCall, sizes: Mapping[str, int], steps: Steps) -> Iterator[Domain]:
    states = [_State({name: Linear({}, value) for name, value in sizes.items()})]
    for scope in program.enclosing[call.line]:
        if isinstance(scope, Branch):
            cases = disjoint_cases(scope.condition, scope.taken)
            states = [state.copy().with_comparisons(case) for state in states for case in cases]
        else:
            for state in states:
                state.enter(scope)
    for state in states:
        reads = tuple(state.access(r) for r in call.reads)
        writes = tuple(state.access(r) for r in call.outputs)
        try:
            propagate(state.system, steps)
        except Infeasible:
            continue
        yield Domain(call, state.system, tuple(variable(v) for v in state.loops), reads, writes)


_Key = tuple[str, tuple[tuple[frozenset[tuple[int, int]], int], ...]]


@dataclass
class _State:
    """A system under construction, with the names in sight."""

    names: dict[str, Linear]
    system: System = field(default_factory=System)
    loops: tuple[int, ...] = ()
    memo: dict[_Key, Linear] = field(default_factory=dict)

    def copy(self) -> _State:
        return _State(dict(self.names), self.system.copy(), self.loops, dict(self.memo))

    def enter(self, scope: For | Assign) -> None:
        if isinstance(scope, Assign):
            self.names[scope.name] = self.form(scope.value)
            return
        made = self.system.new_variable()
        value = variable(made)
        step = self.form(scope.step)
        self.loops = (*self.loops, made)
        if step.coefficients or step.constant != 1:
            turn = variable(self.system.new_variable(low=0))
            distance = self._product(turn, step)
            self.system.equations.append(value - self.form(scope.start) - distance)
            self.system.inequalities.append(value - self.form(scope.start))
        else:
            self.system.inequalities += [value - self.form(e) for e in _parts(scope.start, "max")]
        self.system.inequalities += [(self.form(e) - value).plus(-1) for e in _parts(scope.stop, "min")]
        self.names[scope.variable] = value

    def with_comparisons(self, case: list[Comparison]) -> _State:
        for comparison in case:
            difference = self.form(comparison.left) - self.form(comparison.right)
            if comparison.operator == "==":
                self.system.equations.append(difference)
            elif comparison.operator in (">", ">="):
                self.system.inequalities.append(difference.plus(-1 if comparison.operator == ">" else 0))
            else:
                self.system.inequalities.append((difference * -1).plus(-1 if comparison.operator == "<" else 0))
        return self

    def access(self, reference: TileReference) -> Access:
        return Access(reference, tuple(self.form(e) for e in reference.indices))

    def form(self, expression: Expression) -> Linear:
        """`expression` as an affine form, with definitions added to the system where it is not affine."""
        if isinstance(expression, Constant):
            return Linear({}, expression.value)
        if isinstance(expression, Name):
            return self.names[expression.name]
        operator = expression.operator
        forms = [self.form(o) for o in expression.operands]
        if operator == "+":
            return forms[0] + forms[1]
        if operator == "-":
            return forms[0] - forms[1]
        if operator == "*":
            return self._product(forms[0], forms[1])
        if operator == "//":
            return self._quotient(forms[0], forms[1])
        if operator == "%":
            return forms[0] - self._product(self._quotient(forms[0], forms[1]), forms[1])
        if operator == "**":
            return self._power(forms[0].constant, forms[1])
        if not any(f.coefficients for f in forms):
            values = [f.constant for f in forms]
            folded = {"ceil_log2": lambda: ceil_log2(values[0]), "min": lambda: min(values), "max": lambda: max(values)}
            return Linear({}, folded[operator]())
        return self._defined(operator, *forms)

    def _product(self, first: Linear, second: Linear) -> Linear:
        if not second.coefficients:
            return first * second.constant
        return second * first.constant if not first.coefficients else self._defined("product", first, second)

    def _quotient(self, dividend: Linear, divisor: Linear) -> Linear:
        if divisor.coefficients:
            return self._defined("quotient", dividend, divisor)
        if not dividend.coefficients:
            return Linear({}, dividend.constant // divisor.constant)
        key = _key("quotient", dividend, divisor)
        if key not in self.memo:
            self.memo[key] = self.system.quotient(dividend, divisor.constant)
        return self.memo[key]

    def _power(self, base: int, exponent: Linear) -> Linear:
        if not exponent.coefficients and exponent.constant >= 0:
            return Linear({}, int(base**exponent.constant))
        key = _key(f"power {base}", exponent)
        if key not in self.memo:
            self.memo[key] = self.system.define("power", exponent, base=base)
        return self.memo[key]

    def _defined(self, kind: str, *arguments: Linear) -> Linear:
        key = _key(kind, *arguments)
        if key not in self.memo:
            self.memo[key] = self.system.define(kind, *arguments)
        return self.memo[key]


def _key(kind: str, *forms: Linear) -> _Key:
    return kind, tuple((frozenset(f.coefficients.items()), f.constant) for f in forms)


def _parts(bound: Expression, operator: str) -> tuple[Expression, ...]:
    """Bounds that hold together: the operands of a `min` above, of a `max` below."""
    if not isinstance(bound, Constant | Name) and bound.operator == operator:
        return bound.operands
    return (bound,)
