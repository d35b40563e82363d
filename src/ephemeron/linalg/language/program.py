"""A LAmbdaPACK program as data: loops, conditions, scalars and kernel calls on tiles (survey 2.4, figure 17).

A program says which kernel is called on which tiles; it never touches matrix values. Each execution of a kernel call is
one task, named by a `Node`. Every tile is written at most once, so a tile is immutable once it exists, a task may run
twice with the same effect, and the writer of a tile is unique.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property

from ephemeron.errors import JobError
from ephemeron.linalg.language.expressions import Condition, Constant, Expression

Tile = tuple[str, tuple[int, ...]]
"""A tile of a program's matrices: name of the matrix, and index of the tile."""


class Role(Enum):
    """What a matrix is for: tiles of an input exist before the start; those of an output outlive the run."""

    INPUT = "Input"
    OUTPUT = "Output"
    TEMPORARY = "Temporary"


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """Where a statement is in the source."""

    file: str
    """Path of the source file, or `<program>` for text."""
    line: int
    """Line in the file, from 1."""
    column: int
    """Column in the line, from 1."""

    def __str__(self) -> str:
        return f"{self.file}:{self.line}:{self.column}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Matrix:
    """A tiled matrix that a program reads or writes."""

    name: str
    """The parameter's name."""
    role: Role
    """Input, output or temporary."""
    rank: int
    """Number of tile indices: more than two where a temporary has one index per step of the algorithm."""
    extents: tuple[Expression, ...] | None = None
    """Number of tiles along each index, in sizes; None for a temporary whose range follows from its uses."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TileReference:
    """`matrix[indices]`: one tile, read or written."""

    matrix: str
    """Name of the matrix."""
    indices: tuple[Expression, ...]
    """One expression per tile index."""
    location: Location
    """Where it is in the source."""

    def __str__(self) -> str:
        return f"{self.matrix}[{', '.join(map(str, self.indices))}]"


Option = bool | int | float | str
"""A constant that a kernel takes by keyword."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCall:
    """`outputs = kernel(arguments, options)`: one task per execution."""

    line: int
    """Line in the program's text (`str(program)`), from 1: identifies the statement in a `Node`."""
    outputs: tuple[TileReference, ...]
    """Tiles that the kernel returns, in order."""
    kernel: str
    """Name of the kernel."""
    arguments: tuple[TileReference | Expression, ...]
    """Tiles and integers, by position."""
    options: tuple[tuple[str, Option | Expression], ...] = ()
    """Keyword arguments: constants, or integer expressions."""
    location: Location
    """Where it is in the source."""

    @property
    def reads(self) -> tuple[TileReference, ...]:
        """Tiles among the arguments, in order."""
        return tuple(a for a in self.arguments if isinstance(a, TileReference))


@dataclass(frozen=True, slots=True, kw_only=True)
class Assign:
    """`name = value`: an integer, assigned once in its block and seen by the statements after it."""

    line: int
    """Line in the program's text."""
    name: str
    """The new name."""
    value: Expression
    """Its value."""
    location: Location
    """Where it is in the source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class For:
    """`for variable in range(start, stop, step)`: the body for each value; the order means nothing but the text's."""

    line: int
    """Line in the program's text."""
    variable: str
    """The loop variable."""
    start: Expression
    """First value."""
    stop: Expression
    """Values are less than this."""
    step: Expression
    """Distance between values, positive: a constant, sizes, or a power of two."""
    body: tuple[Statement, ...]
    """Statements."""
    location: Location
    """Where it is in the source."""


@dataclass(frozen=True, slots=True, kw_only=True)
class If:
    """`if condition: body else: orelse`, where the condition depends on sizes and loop variables only."""

    line: int
    """Line in the program's text."""
    condition: Condition
    """The condition."""
    body: tuple[Statement, ...]
    """Statements where it is true."""
    orelse: tuple[Statement, ...] = ()
    """Statements where it is false."""
    else_line: int | None = None
    """Line of `else:` in the program's text."""
    location: Location
    """Where it is in the source."""


Statement = For | If | Assign | KernelCall


@dataclass(frozen=True, slots=True, order=True)
class Node:
    """A task: the kernel call at `line` of the program's text, for these values of the loops around it."""

    line: int
    """Line of the kernel call in the program's text, from 1."""
    indices: tuple[int, ...]
    """Values of the loop variables, outermost first."""

    def __str__(self) -> str:
        return f"{self.line}:{','.join(map(str, self.indices))}"


@dataclass(frozen=True)
class Program:
    """A checked LAmbdaPACK program. `str(program)` is its text, which parses to an equal program."""

    name: str
    """Name of the function."""
    parameters: tuple[str, ...]
    """All parameters, sizes and matrices, in the order of the signature."""
    sizes: tuple[str, ...]
    """Integers that say how many tiles there are, at least 1 each, in the order of the signature."""
    matrices: tuple[Matrix, ...]
    """Tiled matrices, in the order of the signature."""
    body: tuple[Statement, ...]
    """Statements in the order of the text."""
    kernels: tuple[tuple[str, str], ...]
    """Each kernel that is called: its name, and the `module:name` at which functions find it. Sorted."""

    @cached_property
    def calls(self) -> Mapping[int, KernelCall]:
        """Kernel calls by line, in the order of the text."""
        return {call.line: call for call, _ in kernel_calls(self.body)}

    @cached_property
    def enclosing(self) -> Mapping[int, tuple[Scope, ...]]:
        """For each kernel call's line, what must be entered to reach it, outermost first."""
        return {call.line: path for call, path in kernel_calls(self.body)}

    def matrix(self, name: str) -> Matrix:
        """The matrix with this name; `KeyError` without one."""
        for matrix in self.matrices:
            if matrix.name == name:
                return matrix
        raise KeyError(name)

    def loop_variables(self, line: int) -> tuple[str, ...]:
        """Names of the loops around the kernel call at `line`, outermost first: what `Node.indices` holds."""
        return tuple(scope.variable for scope in self.enclosing[line] if isinstance(scope, For))

    def check_sizes(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """`sizes`, complete and positive, in the order of the signature.

        Raises:
            JobError: a size is missing, unknown or not a positive integer.
        """
        if unknown := sorted(set(sizes) - set(self.sizes)):
            raise JobError(f"{self.name} has no size {unknown[0]}", remedy=f"its sizes are {', '.join(self.sizes)}")
        for name in self.sizes:
            value = sizes.get(name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise JobError(f"size {name} of {self.name} is {value!r}", remedy="give a number of tiles, at least 1")
        return {name: int(sizes[name]) for name in self.sizes}

    def __str__(self) -> str:

        return program_text(self)


def with_options(program: Program, **options: Option) -> Program:
    """The program with other constants as those keyword arguments of its kernels that have them."""

    def changed(body: tuple[Statement, ...]) -> tuple[Statement, ...]:
        return tuple(one(statement) for statement in body)

    def one(statement: Statement) -> Statement:
        if isinstance(statement, KernelCall):
            return replace(statement, options=tuple((k, options.get(k, v)) for k, v in statement.options))
        if isinstance(statement, For):
            return replace(statement, body=changed(statement.body))
        if isinstance(statement, If):
            return replace(statement, body=changed(statement.body), orelse=changed(statement.orelse))
        return statement

    return replace(program, body=changed(program.body))


@dataclass(frozen=True, slots=True)
class Branch:
    """One side of an `If` on the way to a statement."""

    condition: Condition
    """The condition of the `If`."""
    taken: bool
    """True in the body, False in the `else` part."""


Scope = For | Branch | Assign
"""What lies on the way from the top of a program to a statement; an `Assign` holds for the statements after it."""


def kernel_calls(body: tuple[Statement, ...], path: tuple[Scope, ...] = ()) -> Iterator[tuple[KernelCall, tuple[Scope, ...]]]:
    """Every kernel call below `body` with the scopes around it, in the order of the text."""
    for statement in body:
        if isinstance(statement, KernelCall):
            yield statement, path
        elif isinstance(statement, Assign):
            path = (*path, statement)
        elif isinstance(statement, For):
            yield from kernel_calls(statement.body, (*path, statement))
        else:
            yield from kernel_calls(statement.body, (*path, Branch(statement.condition, True)))
            yield from kernel_calls(statement.orelse, (*path, Branch(statement.condition, False)))


# -- A program as text --------------------------------------------------------------------------------------------


def program_text(program: Program) -> str:
    """The program's text: line n of it is the line that statements and nodes carry as `line`."""
    roles = {m.name: m.role.value for m in program.matrices}
    signature = ", ".join(f"{name}: {roles.get(name, 'Size')}" for name in program.parameters)
    lines = [f"def {program.name}({signature}):"]
    for matrix in program.matrices:
        if matrix.extents is not None:
            lines.append(f"    tiles({', '.join([matrix.name, *map(str, matrix.extents)])})")
    lines += [f"    {line}" for line in body_lines(program.body)]
    return "\n".join(lines) + "\n"


def body_lines(body: tuple[Statement, ...]) -> Iterator[str]:
    """Lines of a block, without the indentation of the block itself."""
    for statement in body:
        if isinstance(statement, KernelCall):
            yield call_text(statement)
        elif isinstance(statement, Assign):
            yield f"{statement.name} = {statement.value}"
        elif isinstance(statement, For):
            yield f"for {statement.variable} in {range_text(statement)}:"
            yield from (f"    {line}" for line in body_lines(statement.body))
        else:
            yield f"if {statement.condition}:"
            yield from (f"    {line}" for line in body_lines(statement.body))
            if statement.orelse:
                yield "else:"
                yield from (f"    {line}" for line in body_lines(statement.orelse))


def call_text(call: KernelCall) -> str:
    """One kernel call."""
    given = [str(a) for a in call.arguments]
    given += [f"{k}={v!r}" if isinstance(v, bool | int | float | str) else f"{k}={v}" for k, v in call.options]
    return f"{', '.join(map(str, call.outputs))} = {call.kernel}({', '.join(given)})"


def range_text(loop: For) -> str:
    """`range(…)` of a loop, as short as Python allows."""
    parts = [str(loop.start), str(loop.stop), str(loop.step)]
    if loop.step == Constant(1):
        parts = parts[1:2] if loop.start == Constant(0) else parts[:2]
    return f"range({', '.join(parts)})"
