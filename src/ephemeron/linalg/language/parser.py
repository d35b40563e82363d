"""From the source of a function to a `Program`. The function is read, never executed (survey 2.4: embedded in Python).

From Python's syntax tree to expressions and conditions, with the rule that keeps dependencies solvable.

The rule: with values for what stands in exponents and under `ceil_log2`, every expression is affine in the loop variables.
Such quantities take few values (a tree over N tiles has ceil_log2(N) levels), so they can be enumerated; the rest is a system
of linear equations over integers.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from ephemeron.errors import JobError, ProgramError
from ephemeron.linalg.language.expressions import Comparison, Condition, Constant, Expression, Logical, Name, Operation
from ephemeron.linalg.language.kernel import Kernel, load_kernel
from ephemeron.linalg.language.program import Assign, For, If, KernelCall, Location, Matrix, Option, Program, Role, Statement, TileReference

_ROLES = {role.value: role for role in Role}


def parse_function(function: Callable[..., Any]) -> Program:
    """The program whose source is that of `function`; kernels are found by the names that the function sees.

    Raises:
        JobError: the source is not available.
        ProgramError: it breaks a rule of the language.
    """
    try:
        lines, first = inspect.getsourcelines(function)
    except (OSError, TypeError):
        raise JobError(f"the source of {function!r} is not available", remedy="define it in a file") from None
    seen = inspect.getclosurevars(function)
    known = {**seen.globals, **seen.nonlocals}
    names = {n: k for n, k in known.items() if isinstance(k, Kernel)}
    text = "".join(lines)
    indent = len(text) - len(text.lstrip())
    file = inspect.getsourcefile(function) or "<program>"
    return parse_text(textwrap.dedent(text), names, file=file, first_line=first, indent=indent)


def parse_program(text: str, kernels: Mapping[str, str]) -> Program:
    """The program with this text, as `str(program)` gives it.

    Args:
        text: the program's text.
        kernels: path, `module:name`, of each kernel by its name in the text (`dict(program.kernels)`).

    Raises:
        JobError: a kernel cannot be imported.
        ProgramError: the text breaks a rule of the language.
    """
    return parse_text(text, {name: load_kernel(path) for name, path in kernels.items()})


def parse_text(text: str, kernels: Mapping[str, Kernel], *, file: str = "<program>", first_line: int = 1, indent: int = 0) -> Program:
    """The program with this text and these kernels; errors name `file` and lines from `first_line`."""
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        at = Location(file=file, line=first_line + (error.lineno or 1) - 1, column=indent + (error.offset or 1))
        raise ProgramError(f"no valid Python: {error.msg}", location=at) from None
    functions = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    if len(functions) != 1:
        raise ProgramError("a program is one function", location=Location(file=file, line=first_line, column=1))
    return _Parser(functions[0], dict(kernels), file, first_line, indent).program()


@dataclass
class _Parser:
    """State of one pass over a function, in the order of the text."""

    function: ast.FunctionDef
    kernels: dict[str, Kernel]
    file: str
    first_line: int
    indent: int
    roles: dict[str, Role] = field(default_factory=dict)
    sizes: list[str] = field(default_factory=list)
    extents: dict[str, tuple[Expression, ...]] = field(default_factory=dict)
    ranks: dict[str, int] = field(default_factory=dict)
    called: set[str] = field(default_factory=set)
    line: int = 1

    def __post_init__(self) -> None:
        self.expressions = ExpressionParser(self.locate, self.kind_of)

    def locate(self, node: ast.AST) -> Location:
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        return Location(file=self.file, line=self.first_line + line - 1, column=self.indent + column + 1)

    def kind_of(self, name: str) -> str | None:
        if name in self.roles:
            return f"a matrix ({self.roles[name].value})"
        return "a kernel" if name in self.kernels else None

    def fail(self, node: ast.AST, problem: str, remedy: str | None = None) -> NoReturn:
        raise ProgramError(problem, location=self.locate(node), remedy=remedy)

    def program(self) -> Program:
        self._signature()
        body = list(self.function.body)
        if body and isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body.pop(0)  # the docstring
        scalars = Scalars(dict.fromkeys(self.sizes, frozenset()))
        while body and _is_call_of(body[0], "tiles"):
            self._declaration(body.pop(0), scalars)
            self.line += 1
        statements = self._block(body, scalars)
        parameters = [a.arg for a in self.function.args.args]
        matrices = []
        for name, role in self.roles.items():
            if name not in self.ranks:
                self.fail(self.function, f"matrix {name} is never used", "remove it from the signature")
            matrices.append(Matrix(name=name, role=role, rank=self.ranks[name], extents=self.extents.get(name)))
        kernels = tuple(sorted((name, self.kernels[name].path) for name in self.called))
        if not kernels:
            self.fail(self.function, f"{self.function.name} calls no kernel")
        return Program(self.function.name, tuple(parameters), tuple(self.sizes), tuple(matrices), statements, kernels)

    def _signature(self) -> None:
        arguments = self.function.args
        if arguments.posonlyargs or arguments.kwonlyargs or arguments.vararg or arguments.kwarg or arguments.defaults:
            self.fail(self.function, "parameters are plain names with annotations", "write name: Input, Size, …")
        for argument in arguments.args:
            kind = ast.unparse(argument.annotation).rsplit(".", 1)[-1] if argument.annotation else "nothing"
            if kind == "Size":
                self.sizes.append(argument.arg)
            elif kind in _ROLES:
                self.roles[argument.arg] = _ROLES[kind]
            else:
                self.fail(argument, f"{argument.arg} is annotated with {kind}", "use Size, Input, Output or Temporary")

    def _declaration(self, statement: ast.stmt, scalars: Scalars) -> None:
        assert isinstance(statement, ast.Expr)
        assert isinstance(statement.value, ast.Call)
        call = statement.value
        name = call.args[0].id if call.args and isinstance(call.args[0], ast.Name) else ""
        if name not in self.roles or call.keywords or len(call.args) < 2:
            self.fail(statement, "tiles takes a matrix and its numbers of tiles", "write tiles(A, M, N)")
        if name in self.extents:
            self.fail(statement, f"the tiles of {name} are declared twice")
        self.extents[name] = tuple(self.expressions.expression(a, scalars) for a in call.args[1:])
        self.ranks[name] = len(call.args) - 1

    def _block(self, body: list[ast.stmt], scalars: Scalars) -> tuple[Statement, ...]:
        statements: list[Statement] = []
        for node in body:
            self.line += 1
            if isinstance(node, ast.For):
                statements.append(self._for(node, scalars))
            elif isinstance(node, ast.If):
                statements.append(self._if(node, scalars))
            elif isinstance(node, ast.Assign) and len(node.targets) == 1:
                if isinstance(node.targets[0], ast.Name):
                    made, free = self._assign(node, node.targets[0], scalars)
                    scalars = Scalars({**scalars.free, made.name: free})
                    statements.append(made)
                else:
                    statements.append(self._call(node, scalars))
            else:
                self.fail(
                    node,
                    f"{ast.unparse(node).splitlines()[0]!r} is no statement of the language",
                    "use for, if, name = expression, and tile = kernel(…)",
                )
        return tuple(statements)

    def _fresh(self, node: ast.AST, name: str, scalars: Scalars) -> None:
        if name in scalars.free or name in self.roles:
            self.fail(node, f"{name} is assigned a second time", "names are assigned once: take another")

    def _for(self, node: ast.For, scalars: Scalars) -> For:
        line, call = self.line, node.iter
        if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "range"):
            self.fail(node, f"a loop runs over range, not {ast.unparse(call)}")
        if node.orelse or call.keywords or not 1 <= len(call.args) <= 3 or not isinstance(node.target, ast.Name):
            self.fail(node, "a loop is for name in range(stop), range(start, stop) or range(start, stop, step)")
        variable = node.target.id
        self._fresh(node.target, variable, scalars)
        bounds = [self.expressions.expression(a, scalars) for a in call.args]
        start, stop = (Constant(0), bounds[0]) if len(bounds) == 1 else (bounds[0], bounds[1])
        step = bounds[2] if len(bounds) == 3 else Constant(1)
        if isinstance(step, Constant) and step.value < 1:
            self.fail(call.args[2], f"the step is {step}", "steps are positive")
        if free_variables(step, scalars):
            self.fail(call.args[2], f"the step {step} depends on a loop variable", "use a constant or a power of two")
        inner = Scalars({**scalars.free, variable: frozenset([variable])})
        body = self._block(node.body, inner)
        return For(line=line, variable=variable, start=start, stop=stop, step=step, body=body, location=self.locate(node))

    def _if(self, node: ast.If, scalars: Scalars) -> If:
        line = self.line
        condition = self.expressions.condition(node.test, scalars)
        body = self._block(node.body, scalars)
        else_line = None
        if node.orelse:
            self.line += 1
            else_line = self.line
        orelse = self._block(node.orelse, scalars)
        return If(line=line, condition=condition, body=body, orelse=orelse, else_line=else_line, location=self.locate(node))

    def _assign(self, node: ast.Assign, target: ast.Name, scalars: Scalars) -> tuple[Assign, frozenset[str]]:
        self._fresh(target, target.id, scalars)
        if isinstance(node.value, ast.Call) and getattr(node.value.func, "id", "") in self.kernels:
            self.fail(node, f"the result of a kernel goes into a tile, not into {target.id}", "write X[i, j] = …")
        value = self.expressions.expression(node.value, scalars)
        made = Assign(line=self.line, name=target.id, value=value, location=self.locate(node))
        return made, free_variables(value, scalars)

    def _call(self, node: ast.Assign, scalars: Scalars) -> KernelCall:
        target, value = node.targets[0], node.value
        targets = list(target.elts) if isinstance(target, ast.Tuple) else [target]
        outputs = tuple(self._tile(t, scalars, written=True) for t in targets)
        name = value.func.id if isinstance(value, ast.Call) and isinstance(value.func, ast.Name) else ""
        if not isinstance(value, ast.Call) or name not in self.kernels:
            self.fail(value, f"{ast.unparse(value)} calls no kernel", f"kernels here: {', '.join(self.kernels)}")
        found = self.kernels[name]
        if found.outputs != len(outputs):
            self.fail(node, f"{name} has {found.outputs} results, not {len(outputs)}")
        arguments = tuple(self._argument(a, scalars) for a in value.args)
        options = tuple((k.arg or "**", self._option(k.value, scalars)) for k in value.keywords)
        try:
            found.signature.bind(*arguments, **dict(options))
        except TypeError as error:
            self.fail(value, f"{name}: {error}", f"its signature is {name}{found.signature}")
        self._check_kinds(value, found, arguments)
        if len({(o.matrix, o.indices) for o in outputs}) < len(outputs):
            self.fail(node, "one call writes a tile twice", "each tile is written once")
        self.called.add(name)
        return KernelCall(line=self.line, outputs=outputs, kernel=name, arguments=arguments, options=options, location=self.locate(node))

    def _check_kinds(self, node: ast.Call, found: Kernel, arguments: tuple[TileReference | Expression, ...]) -> None:
        for parameter, given, place in zip(found.signature.parameters.values(), arguments, node.args, strict=False):
            integer = parameter.annotation in (int, "int")
            if integer is isinstance(given, TileReference):
                wanted = "an integer" if integer else "a tile"
                self.fail(place, f"{found.name} takes {wanted} as {parameter.name}, not {ast.unparse(place)}")

    def _argument(self, node: ast.expr, scalars: Scalars) -> TileReference | Expression:
        if isinstance(node, ast.Subscript):
            return self._tile(node, scalars, written=False)
        return self.expressions.expression(node, scalars)

    def _option(self, node: ast.expr, scalars: Scalars) -> Option | Expression:
        if isinstance(node, ast.Constant) and isinstance(node.value, bool | float | str):
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.operand, ast.Constant):
            number = node.operand.value
            if isinstance(node.op, ast.USub) and isinstance(number, float):
                return -number
        value = self.expressions.expression(node, scalars)
        return value.value if isinstance(value, Constant) else value

    def _tile(self, node: ast.expr, scalars: Scalars, *, written: bool) -> TileReference:
        if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
            self.fail(node, f"{ast.unparse(node)} is no tile", "write matrix[i, j]")
        name = node.value.id
        if name not in self.roles:
            self.fail(node, f"{name} is no matrix", f"matrices here: {', '.join(self.roles) or 'none'}")
        if written and self.roles[name] is Role.INPUT:
            self.fail(node, f"{name} is an input, and is written", "write into an Output or a Temporary")
        parts = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
        indices = tuple(self.expressions.expression(p, scalars) for p in parts)
        if self.ranks.setdefault(name, len(indices)) != len(indices):
            self.fail(node, f"{name} has {self.ranks[name]} indices elsewhere, and {len(indices)} here")
        return TileReference(matrix=name, indices=indices, location=self.locate(node))


def _is_call_of(statement: ast.stmt, name: str) -> bool:
    call = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == name


# -- from Python's syntax tree to expressions and conditions ------------------------------------------------------


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
