"""`@lambdapack` and the names that a program's source uses.

The annotations give type checkers and editors what they need to check a program as Python; the function itself is never called.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from itertools import product
from typing import Any

from ephemeron.errors import JobError
from ephemeron.linalg.analysis.unrolled import check_unrolled
from ephemeron.linalg.language.expressions import ceil_log2
from ephemeron.linalg.language.kernel import load_kernel
from ephemeron.linalg.language.parser import parse_function, parse_text
from ephemeron.linalg.language.program import Program, Role

__all__ = ["Input", "Output", "Size", "Temporary", "ceil_log2", "lambdapack", "tiles"]

Size = int
"""A number of tiles, at least 1."""


class Input:
    """A matrix whose tiles exist before the program starts."""

    def __getitem__(self, index: int | tuple[int, ...]) -> Any: ...


class Temporary(Input):
    """A matrix whose tiles are deleted once all their readers have ended."""

    def __setitem__(self, index: int | tuple[int, ...], tile: Any) -> None: ...


class Output(Temporary):
    """A matrix whose tiles are the program's result."""


def tiles(matrix: Input, *extents: int) -> None:
    """Declare the number of tiles of a matrix along each index. At the top of a program only; executed nowhere."""


def lambdapack(function: Callable[..., Any]) -> Program:
    """The LAmbdaPACK program that a function's source describes.

    Syntax and types are checked, then, with every size up to 3, that indices are within the declared numbers of tiles, that no
    tile is written twice, and that every tile is written before it is read. `analysis.Analysis.verify` checks the same for
    given sizes of any magnitude.

    Raises:
        ProgramError: a rule is broken; names file, line and column.
    """
    return checked(parse_function(function))


def checked(program: Program) -> Program:
    """The program, checked with every size up to 3.

    Raises:
        ProgramError: a rule is broken.
    """
    for sizes in product((1, 2, 3), repeat=len(program.sizes)):
        check_unrolled(program, dict(zip(program.sizes, sizes, strict=True)))
    return program


# -- programs made of programs ------------------------------------------------------------------------------------


def renamed(program: Program, **names: str) -> Program:
    """The program with other names of matrices and sizes.

    Args:
        program: to rename in.
        names: new names by the present ones.

    Raises:
        JobError: the program has no such name, or the new one is taken.
    """
    if unknown := sorted(set(names) - set(program.parameters)):
        raise JobError(f"{program.name} has no parameter {unknown[0]}", remedy=f"it has {', '.join(program.parameters)}")
    if taken := sorted(set(names.values()) & (_names(_function(program)) - set(names))):
        raise JobError(f"{program.name} has a name {taken[0]} already", remedy="take another")
    function = _Renamer(names).visit(_function(program))
    return parse_text(ast.unparse(function), {name: load_kernel(path) for name, path in program.kernels})


def in_sequence(name: str, *programs: Program, keeps: tuple[str, ...] = ()) -> Program:
    """The programs one after the other. Matrices and sizes of one name are one; temporary matrices are each program's own.

    A matrix that one program makes and a later one takes is temporary: its tiles are deleted after their last reader.

    Args:
        name: of the whole.
        programs: in their order, at least one.
        keeps: matrices that stay outputs although a later program takes them.

    Raises:
        JobError: two programs make a matrix of one name, or one takes a matrix that a later one makes.
    """
    roles: dict[str, Role] = {}
    sizes: dict[str, None] = {}
    declared: dict[str, ast.stmt] = {}
    body: list[ast.stmt] = []
    for number, program in enumerate(programs):
        own = {m.name: f"{m.name}{number}" for m in program.matrices if m.role is Role.TEMPORARY and number}
        function = _function(renamed(program, **own))
        for matrix in program.matrices:
            new = own.get(matrix.name, matrix.name)
            _add_role(roles, new, matrix.role, name, is_kept=new in keeps)
        sizes |= dict.fromkeys(program.sizes)
        for statement in function.body:
            if (of := _declared(statement)) is None:
                body.append(statement)
            else:
                declared.setdefault(of, statement)
    signature = ", ".join([*(f"{m}: {role.value}" for m, role in roles.items()), *(f"{size}: Size" for size in sizes)])
    lines = [f"def {name}({signature}):"]
    lines += [f"    {line}" for each in (*declared.values(), *body) for line in ast.unparse(each).splitlines()]
    kernels = {kernel: load_kernel(path) for program in programs for kernel, path in program.kernels}
    return checked(parse_text("\n".join(lines) + "\n", kernels))


def _add_role(roles: dict[str, Role], matrix: str, role: Role, name: str, *, is_kept: bool) -> None:
    before = roles.get(matrix)
    if before is None:
        roles[matrix] = role
    elif role is Role.OUTPUT:
        raise JobError(
            f"{matrix} of {name} is made by a program after another one that makes or takes it", remedy="rename it in one of them"
        )
    elif before is Role.OUTPUT and not is_kept:
        roles[matrix] = Role.TEMPORARY


def _function(program: Program) -> ast.FunctionDef:
    function = ast.parse(str(program)).body[0]
    assert isinstance(function, ast.FunctionDef)
    return function


def _declared(statement: ast.stmt) -> str | None:
    """The matrix whose tiles a statement declares."""
    if not isinstance(statement, ast.Expr) or not isinstance(statement.value, ast.Call):
        return None
    of = statement.value.args[0]
    assert isinstance(of, ast.Name)
    return of.id


def _names(function: ast.FunctionDef) -> set[str]:
    parameters = {argument.arg for argument in function.args.args}
    return parameters | {node.id for node in ast.walk(function) if isinstance(node, ast.Name)}


class _Renamer(ast.NodeTransformer):
    def __init__(self, names: dict[str, str]) -> None:
        self._names = names

    def visit_Name(self, node: ast.Name) -> ast.Name:
        return ast.Name(self._names.get(node.id, node.id), node.ctx)

    def visit_arg(self, node: ast.arg) -> ast.arg:
        return ast.arg(self._names.get(node.arg, node.arg), node.annotation)
