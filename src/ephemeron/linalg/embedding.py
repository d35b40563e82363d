"""`@lambdapack` and the names that a program's source uses.

The annotations give type checkers and editors what they need to check a program as Python; the function itself is never called.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

from ephemeron.linalg.analysis.small_sizes import check_unrolled
from ephemeron.linalg.language.expressions import ceil_log2
from ephemeron.linalg.language.parser import parse_function
from ephemeron.linalg.language.program import Program

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
