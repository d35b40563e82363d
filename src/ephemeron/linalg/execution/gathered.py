"""One task that reads all tiles of a matrix and writes whole matrices: a solver for what fits into one function.

LAmbdaPACK's kernel calls name each tile that they take, so their number is fixed; a solver takes as many as there are.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ephemeron.blocking import run as blocking
from ephemeron.communication.channels.base import Buffer, Channel
from ephemeron.communication.channels.wrappers import size_of
from ephemeron.config.typed import Typed, build, plain
from ephemeron.errors import JobError, MatrixError
from ephemeron.executor import FunctionExecutor
from ephemeron.functions.shipped_tasks import Load, ShippedGraph
from ephemeron.functions.tasks.model import TaskEdge, TaskResult, TaskSpec
from ephemeron.functions.tasks.result_store import TaskOutputs
from ephemeron.linalg.execution.claims import TEMPORARY, claimed
from ephemeron.linalg.execution.program_data import LinalgReport, check_finite, located_error, run_name
from ephemeron.linalg.execution.program_graph import TaskTraffic
from ephemeron.linalg.kernels import factors, spectra
from ephemeron.linalg.matrices import tile_store
from ephemeron.linalg.matrices.lifetimes import Owners
from ephemeron.linalg.matrices.stored import StoredMatrix, TileFamily, Tiles, decode_tile, encode_tile

SOLVERS: Mapping[str, Callable[..., tuple[npt.NDArray[Any], ...]]] = {
    "eigh": spectra.hermitian_eigen,
    "eigvalsh": spectra.hermitian_eigenvalues,
    "svd": spectra.singular_vectors,
    "svdvals": spectra.singular_values,
    "triangle_condition": factors.triangle_condition,
    "cholesky_condition": factors.cholesky_condition,
    "lu_condition": factors.lu_condition,
    "pseudo_inverse": factors.pseudo_inverse,
}
"""By name: takes the matrix, then what else there is of `GatheredData`: further matrices, a list of the family's tiles, the number."""
_COPIES = {
    "eigh": 5,
    "eigvalsh": 3,
    "svd": 8,
    "svdvals": 3,
    "triangle_condition": 2,
    "cholesky_condition": 2,
    "lu_condition": 4,
    "pseudo_inverse": 10,
}
"""Matrices of n × n values that a solver holds at once, its input and workspace included; of a narrow band, n × 2 b."""


def solver_bytes(solver: str, rows: int, columns: int, itemsize: int, *, band: int | None = None) -> float:
    """Memory that a solver takes.

    Args:
        solver: one of `SOLVERS`.
        rows, columns: of the matrix.
        itemsize: bytes of a value.
        band: width of the band, where the matrix is one.
    """
    is_narrow = band is not None and columns > spectra.NARROW * band and solver in ("eigvalsh", "svdvals")
    held = columns * 2 * (band or 0) if is_narrow else rows * columns
    return float(_COPIES[solver] * held * itemsize)


def check_memory(solver: str, rows: int, columns: int, itemsize: int, *, band: int | None, memory_mb: int) -> None:
    """Refuses what does not fit.

    Raises:
        JobError: a function has not enough memory.
    """
    needed = solver_bytes(solver, rows, columns, itemsize, band=band) / 2**20
    if needed > memory_mb:
        enough = 2 ** math.ceil(math.log2(needed))
        raise JobError(
            f"{solver} of {rows} x {columns} needs {needed:.0f} MB in one function, which has {memory_mb}",
            remedy=f"use memory_mb={enough}" + (", values only, or randomized_svd" if solver in ("eigh", "svd") else ""),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class GatheredData(Typed):
    """The task."""

    solver: str
    """One of `SOLVERS`."""
    matrix: StoredMatrix
    """That is read."""
    outputs: tuple[StoredMatrix, ...]
    """In the order of the solver's results."""
    others: tuple[StoredMatrix, ...] = ()
    """Further matrices that are read."""
    family: TileFamily | None = None
    """Tiles (k, 0) that are read, for k below `family_tiles`."""
    family_tiles: int = 0
    number: int | None = None
    """What the solver takes beside matrices."""
    tries: int = 3
    """Of the task."""
    checked: bool = False
    """Whether a value that is NaN or infinite is refused before it is computed with."""


class GatheredGraph(ShippedGraph):
    """A graph of one task."""

    def __init__(self, data: GatheredData) -> None:
        self._data = data

    def starts(self, name: str, function: str) -> Iterator[tuple[TaskSpec, int]]:
        """The task, and its order."""
        yield TaskSpec(id=f"{name}-0", function=function, inputs=tuple(self._keys()), max_tries=self._data.tries), 0

    def _keys(self) -> Iterator[str]:
        for a in (self._data.matrix, *self._data.others):
            yield from (a.key(i, j) for i, j in a.indices() if a.is_stored(i, j))
        if self._data.family is not None:
            yield from (self._data.family.key((k, 0)) for k in range(self._data.family_tiles))

    def edges(self, task: TaskSpec) -> Sequence[TaskEdge]:
        return ()

    def run(self, task: TaskSpec, inputs: Sequence[memoryview]) -> object:
        a = self._data.matrix
        read = iter([np.asarray(decode_tile(data, key=key)) for key, data in zip(task.inputs, inputs, strict=True)])
        tiles = _tiles_of(a, read)
        for (i, j), tile in tiles.items() if self._data.checked else ():
            first = (i * a.tile_rows, j * a.tile_columns)
            check_finite(tile, matrix="A", first=first, index=(i, j), name=self._data.solver)
        blocks = spectra.Blocks(a.shape, a.tile_rows, tiles, a.structure == "lower band")
        more: list[Any] = [spectra.Blocks(b.shape, b.tile_rows, _tiles_of(b, read)) for b in self._data.others]
        if self._data.family is not None:
            more.append(list(read))
        if self._data.number is not None:
            more.append(self._data.number)
        try:
            found = SOLVERS[self._data.solver](blocks, *more)
        except MatrixError as error:
            raise located_error(error, self._data.solver, [error.where] if error.where else []) from None
        objects: dict[str, Sequence[Buffer]] = {}
        for matrix, array in zip(self._data.outputs, found, strict=True):
            for i, j in matrix.indices():
                objects[matrix.key(i, j)] = encode_tile(np.ascontiguousarray(array[matrix.slices(i, j)]))
        traffic = TaskTraffic(read=sum(d.nbytes for d in inputs), written=sum(map(size_of, objects.values())))
        return TaskOutputs(objects=objects, value=plain(traffic))


def _tiles_of(a: StoredMatrix, read: Iterator[npt.NDArray[Any]]) -> dict[tuple[int, int], npt.NDArray[Any]]:
    """Its stored tiles by index, as it has them, from those that were read."""
    return {(i, j): np.asarray(a.seen(next(read))) for i, j in a.indices() if a.is_stored(i, j)}


async def open_gathered(data: bytes, channel: Channel, load: Load) -> GatheredGraph:
    """The graph of `GatheredData`, where tasks run."""
    return GatheredGraph(build(GatheredData, json.loads(data), where="solver"))


def run_gathered(
    solver: str,
    matrix: StoredMatrix,
    outputs: Sequence[StoredMatrix],
    *,
    executor: FunctionExecutor,
    owners: Owners | None = None,
    checked: bool = False,
    others: Sequence[StoredMatrix] = (),
    family: TileFamily | None = None,
    family_tiles: int = 0,
    number: int | None = None,
) -> tuple[list[StoredMatrix], LinalgReport]:
    """Runs a solver in one function. One that was interrupted is not computed again once its results are whole.

    Args:
        solver: one of `SOLVERS`.
        matrix: with square tiles.
        outputs: what the results will look like; their names are made here.
        executor: runs the task.
        owners: keep what is made; None: it stays until it is deleted.
        checked: refuse values that are NaN or infinite.
        others, family, family_tiles, number: see `GatheredData`.

    Raises:
        TaskFailed: the solver failed.
    """
    inputs: dict[str, Tiles] = {"A": matrix, **{f"B{n}": each for n, each in enumerate(others)}}
    if family is not None:
        inputs["F"] = family
    sizes = {} if number is None else {"number": number}
    name = f"{solver}-{run_name(solver, sizes, inputs, checked=['A'] * checked)}"
    made = [dataclasses.replace(output, name=f"{name}-{k}", generation="") for k, output in enumerate(outputs)]

    async def is_whole() -> bool:
        async with tile_store.opened(made[0].store) as channel:
            return all([await tile_store.is_whole(channel, each) for each in made])

    whole = blocking(lambda interrupts: is_whole())
    if owners is not None:
        owners.begin(blocking(lambda interrupts: tile_store.not_kept(made)) if whole else made)
    if whole:
        return made, LinalgReport(algorithm=solver)
    data = GatheredData(
        solver=solver,
        matrix=matrix,
        outputs=tuple(made),
        tries=executor.tries,
        checked=checked,
        others=tuple(others),
        family=family,
        family_tiles=family_tiles,
        number=number,
    )
    results: list[TaskResult] = []
    began, bill_before = time.perf_counter(), executor.bill().cost_usd
    with claimed(made[0].store, f"{name}{TEMPORARY}", executor):
        future = executor.run_graph(
            open_gathered,
            json.dumps(plain(data), separators=(",", ":"), sort_keys=True).encode(),
            GatheredGraph(data).starts,
            tasks=1,
            name=solver,
            code=[],
            on_result=results.append,
        )
        try:
            future.result()
        finally:
            future.cancel()
    traffic = [build(TaskTraffic, r.value, where=f"result of {r.id}") for r in results]
    report = LinalgReport(
        algorithm=solver,
        tasks=1,
        seconds=time.perf_counter() - began,
        core_seconds=sum(r.compute_s for r in results),
        bytes_read=sum(t.read for t in traffic),
        bytes_written=sum(t.written for t in traffic),
        cost_usd=executor.bill().cost_usd - bill_before,
    )

    async def finish() -> None:
        async with tile_store.opened(made[0].store) as channel:
            for each in made:
                await tile_store.describe(channel, each)
            await tile_store.delete(channel, f"{name}{TEMPORARY}")

    blocking(lambda interrupts: finish())
    return made, report
