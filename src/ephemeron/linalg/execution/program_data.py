"""What functions need to compute any task of a program: its text, sizes, and where the tiles of its matrices are. Plain data."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from ephemeron.config.typed import Typed, build, plain
from ephemeron.errors import MatrixError, NotConverged, NotFinite, NotHermitian, NotPositiveDefinite, SingularMatrix, TaskFailed
from ephemeron.linalg.matrices.stored import StoredMatrix, TileFamily, Tiles


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramData(Typed):
    """A program that is to run. It is signed, for it names the code of kernels."""

    text: str
    """Of the program."""
    kernels: Mapping[str, str]
    """By name: reference of the code (`shipped_code.CodeLoader`)."""
    sizes: Mapping[str, int]
    """Numbers of tiles."""
    matrices: Mapping[str, StoredMatrix]
    """Inputs and outputs by the program's names."""
    families: Mapping[str, TileFamily]
    """Inputs and outputs whose tiles are no parts of one matrix, such as the reflectors of a QR factorisation."""
    temporaries: str
    """Prefix of the tiles of temporary matrices, below the store of the outputs."""
    store: str
    """Address of that store."""
    tries: int = 3
    """Of each task."""
    resumes: bool = False
    """Whether tiles of an earlier run may be there."""
    checked: tuple[str, ...] = ()
    """Inputs in which a value that is NaN or infinite is refused."""

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps(plain(self), separators=(",", ":"), sort_keys=True).encode()

    @staticmethod
    def from_bytes(data: bytes) -> ProgramData:
        """Reverse of `to_bytes`."""
        return build(ProgramData, json.loads(data), where="program")


def run_name(
    text: str,
    sizes: Mapping[str, int],
    inputs: Mapping[str, Tiles],
    *,
    kernels: Mapping[str, str] | None = None,
    checked: Sequence[str] = (),
) -> str:
    """Name of what a program makes of some inputs: the same for the same program and values, so that a run can be resumed.

    Args:
        text: of the program.
        sizes: numbers of tiles.
        inputs: by name. A generation says which values are stored under the name of a matrix.
        kernels: digests of those that may have changed since an earlier run, by name.
        checked: inputs in which all values are finite, or nothing is made.
    """
    parts = {"text": text, "sizes": dict(sizes), "inputs": {name: plain(each) for name, each in inputs.items()}}
    parts |= {"kernels": dict(kernels or {}), "checked": sorted(checked)}
    return hashlib.blake2b(json.dumps(parts, sort_keys=True).encode(), digest_size=8).hexdigest()


# -- A kernel's error on its way from a function to the caller ----------------------------------------------------


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


# -- what a computation did: tasks, time, bytes, cost -------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class LinalgReport:
    """Figures of a computation, all of them measured but the cost, which is at list prices."""

    algorithm: str
    tasks: int = 0
    seconds: float = 0.0
    """From the call to the last result."""
    core_seconds: float = 0.0
    """Seconds that tasks computed, times the vCPUs of a function."""
    bytes_read: int = 0
    """By tasks, those of cached tiles included."""
    bytes_written: int = 0
    """Tiles that tasks stored."""
    cost_usd: float = 0.0
    """Of functions and requests so far: for local functions, what a cloud's would cost."""
    resumed: int = 0
    """Tasks whose tiles were there from an earlier run."""

    def __add__(self, other: LinalgReport) -> LinalgReport:
        """Figures of two computations, one after the other, under the name of the first."""
        sums = {f.name: getattr(self, f.name) + getattr(other, f.name) for f in fields(self) if f.name != "algorithm"}
        return replace(self, **sums)

    def __str__(self) -> str:
        resumed = f" ({self.resumed} of them from an earlier run)" if self.resumed else ""
        return (
            f"{self.algorithm}: {self.tasks} task{'s' * (self.tasks != 1)}{resumed} in {self.seconds:.2f} s, {self.core_seconds:.2f} core-seconds; "
            f"{self.bytes_read / 1e6:.1f} MB read, {self.bytes_written / 1e6:.1f} MB written; ${self.cost_usd:.6f}"
        )
