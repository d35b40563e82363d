"""A kernel's error on its way from a function to the caller: it names the program, the tiles, and the row of the tile."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ephemeron.errors import (
    MatrixError,
    NotConverged,
    NotFinite,
    NotHermitian,
    NotPositiveDefinite,
    SingularMatrix,
    TaskFailed,
)

_KINDS = {kind.__name__: kind for kind in (NotConverged, NotFinite, NotHermitian, NotPositiveDefinite, SingularMatrix)}
_TEXT = re.compile(r"(?P<kind>\w+): (?P<kernel>\w+): (?P<message>.*) \((?P<where>.*), row (?P<row>\d+)\)", re.DOTALL)


def located_error(error: MatrixError, program: str, tiles: Iterable[str]) -> MatrixError:
    """The error of a task, with the program, the tiles that it writes, and the row in the tile."""
    return error.at(", ".join([program, *tiles, f"row {error.position}"]))


def matrix_error(failure: TaskFailed) -> MatrixError | None:
    """The error that `located_error` made, from the failure of the task; None: it failed otherwise."""
    found = _TEXT.fullmatch(str(failure))
    if found is None or found["kind"] not in _KINDS:
        return None
    made: MatrixError = _KINDS[found["kind"]](
        found["message"], kernel=found["kernel"], position=int(found["row"]), where=found["where"]
    )
    for note in getattr(failure, "__notes__", ()):
        made.add_note(note)
    return made
