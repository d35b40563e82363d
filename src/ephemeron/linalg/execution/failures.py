"""A kernel's error on its way from a function to the caller: it names the program, the tiles, and the row of the tile."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from ephemeron.errors import MatrixError, NotConverged, NotFinite, NotHermitian, NotPositiveDefinite, SingularMatrix, TaskFailed

_KINDS = {kind.__name__: kind for kind in (NotConverged, NotFinite, NotHermitian, NotPositiveDefinite, SingularMatrix)}
_TEXT = re.compile(r"(?P<kind>\w+): (?P<kernel>\w+): (?P<message>.*) \((?P<where>.*), row (?P<row>\d+)\)", re.DOTALL)


def located_error(error: MatrixError, program: str, tiles: Iterable[str], *, first_row: int | None = None) -> MatrixError:
    """The error of a task, with the program, the tiles that it writes, and the row in the tile.

    Args:
        error: of a kernel.
        program: its name, which users know, unlike the kernel's.
        tiles: that the task writes.
        first_row: of the first of these, in its matrix, where that is known.
    """
    message = error.message if first_row is None else f"{error.message}: row {first_row + error.position} of the matrix"
    where = ", ".join([program, *tiles, f"row {error.position}"])
    return type(error)(message, kernel=program, position=error.position, where=where)


def check_finite(tile: npt.NDArray[Any], *, matrix: str, first: tuple[int, int], index: tuple[int, int], name: str) -> None:
    """Refuses a tile of a given matrix in which a value is NaN or infinite.

    Args:
        tile: its values.
        matrix: its name in the program.
        first: row and column of the matrix with which the tile begins.
        index: of the tile.
        name: of the program.

    Raises:
        NotFinite: names the first of these values.
    """
    finite = np.isfinite(tile)
    if finite.all():
        return
    row, column = (int(x) for x in np.argwhere(~finite)[0])
    raise NotFinite(
        f"the value at {first[0] + row}, {first[1] + column} of {matrix} is {tile[row, column]}",
        kernel=name,
        position=row,
        where=f"{name}, tile {index[0]}, {index[1]} of {matrix}, row {row}",
    )


def matrix_error(failure: TaskFailed) -> MatrixError | None:
    """The error that `located_error` made, from the failure of the task; None: it failed otherwise."""
    found = _TEXT.fullmatch(str(failure))
    if found is None or found["kind"] not in _KINDS:
        return None
    made: MatrixError = _KINDS[found["kind"]](found["message"], kernel=found["kernel"], position=int(found["row"]), where=found["where"])
    for note in getattr(failure, "__notes__", ()):
        made.add_note(note)
    return made
