"""Bounds, single assignment and order of writes and reads, checked by running a program's loops at small sizes."""

from __future__ import annotations

from collections.abc import Mapping

from ephemeron.errors import ProgramError
from ephemeron.linalg.analysis.unrolled import located, walk
from ephemeron.linalg.language.expressions import evaluate
from ephemeron.linalg.language.program import Program, Role, Tile, TileReference


def check_unrolled(program: Program, sizes: Mapping[str, int]) -> None:
    """Check every access of `program` at `sizes`; time grows with the number of tasks.

    Raises:
        ProgramError: an index is out of bounds, a tile is written twice, or read without having been written before.
    """
    written: set[Tile] = set()
    extents = {m.name: None if m.extents is None else [evaluate(e, sizes) for e in m.extents] for m in program.matrices}
    given = ", ".join(f"{n} = {v}" for n, v in sizes.items())
    inputs = {m.name for m in program.matrices if m.role is Role.INPUT}

    def check_bounds(reference: TileReference, tile: Tile, at: str) -> None:
        limits = extents[reference.matrix]
        for place, index in enumerate(tile[1]):
            if index < 0 or (limits is not None and index >= limits[place]):
                shape = "" if limits is None else f", which has {' × '.join(map(str, limits))} tiles"
                raise ProgramError(
                    f"{reference} is {described(tile)} at {at}: outside {reference.matrix}{shape}", location=reference.location
                )

    for node, values in walk(program, sizes):
        call = program.calls[node.line]
        here = {n: v for n, v in values.items() if n not in sizes}
        at = ", ".join([given, *(f"{n} = {v}" for n, v in here.items())])
        try:
            read = [(r, located(r, values)) for r in call.reads]
            wrote = [(r, located(r, values)) for r in call.outputs]
        except ArithmeticError as error:
            raise ProgramError(f"{error} at {at}", location=call.location) from None
        for reference, tile in [*read, *wrote]:
            check_bounds(reference, tile, at)
        for reference, tile in read:
            if reference.matrix not in inputs and tile not in written:
                raise ProgramError(f"{reference} reads {described(tile)} at {at}, which is not written before", location=reference.location)
        for reference, tile in wrote:
            if tile in written:
                raise ProgramError(
                    f"{reference} writes {described(tile)} at {at}, which is written already",
                    location=reference.location,
                    remedy="each tile is written once",
                )
            written.add(tile)


def described(tile: Tile) -> str:
    """A tile as text."""
    return f"{tile[0]}[{', '.join(map(str, tile[1]))}]"
