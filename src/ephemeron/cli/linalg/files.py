"""Files of `ephemeron linalg`: matrices that it reads, where their tiles are stored, and results that it writes."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

    from ephemeron.executor import FunctionExecutor
    from ephemeron.executor.programs import Launch
    from ephemeron.linalg import BigMatrix

KEPT = ".tiles"
"""Suffix of files that name a matrix in a store: inputs of a command that is given again on a machine without its files."""


@dataclass(frozen=True, slots=True)
class Source:
    """A matrix in a file."""

    shape: tuple[int, int]
    dtype: np.dtype[Any]
    store: Callable[..., BigMatrix]
    """Stores it as tiles; takes `tile`, `store` and `name`."""

    def tiles(self, tile: tuple[int, int], *, store: str, name: str) -> BigMatrix:
        """Its tiles: stored now, or by an earlier command that was interrupted."""
        from ephemeron.errors import JobError
        from ephemeron.linalg import BigMatrix

        try:
            return BigMatrix.open(store, name)
        except JobError:
            return self.store(tile=tile, store=store, name=name)


def source_of(path: Path) -> Source:
    """The matrix in a file.

    Raises:
        JobError: there is none.
    """
    from ephemeron.errors import JobError
    from ephemeron.linalg import BigMatrix
    from ephemeron.linalg.matrices import files

    if not path.exists():
        raise JobError(f"there is no {path}")
    if path.suffix == KEPT:
        found = BigMatrix.open(*json.loads(path.read_text()))
        return Source(found.shape, found.dtype, lambda **place: found)
    if path.suffix == ".parquet":
        table = files.ParquetColumns(path)
        return Source(table.shape, table.dtype, partial(BigMatrix.from_parquet, path))
    if path.suffix not in (".npy", ".zarr"):
        raise JobError(f"{path} is no matrix by its name", remedy="give .npy, .zarr or .parquet")
    array = files.open_npy(path) if path.suffix == ".npy" else files.open_zarr(path)
    if array.ndim not in (1, 2) or 0 in array.shape:
        raise JobError(f"{path} has the shape {tuple(array.shape)}", remedy="give a matrix, with two dimensions")
    shape = (array.shape[0], array.shape[1] if array.ndim == 2 else 1)
    read = BigMatrix.from_npy if path.suffix == ".npy" else BigMatrix.from_zarr
    return Source(shape, array.dtype, partial(read, path))


@contextlib.contextmanager
def stored(
    sources: Sequence[Source], tiles: Sequence[tuple[int, int]], *, store: str, name: str, pool: FunctionExecutor, stay: bool = False
) -> Iterator[list[BigMatrix]]:
    """Inputs of a command as tiles while it computes. They stay where it is interrupted or fails, so that the same command goes on, and go where
    the matrices themselves are refused.

    Args:
        sources: of matrices.
        tiles: shapes of their tiles.
        store: address for tiles.
        name: of the command.
        pool: computes.
        stay: they stay where they were found. One process at a time drives the run that they belong to.

    Raises:
        JobError: another process runs the same command.
    """
    from ephemeron.blocking import run as blocking
    from ephemeron.errors import JobError, MatrixError
    from ephemeron.linalg.execution.claims import TEMPORARY, ProgramClaim, claimed, claims_of
    from ephemeron.linalg.matrices import tile_store

    claims = f"{name}{TEMPORARY}"

    async def running() -> list[ProgramClaim]:
        async with tile_store.opened(store) as channel:
            return [c for c in await claims_of(channel, claims) if c.client_lives and c.process != os.getpid()]

    async def released() -> None:
        async with tile_store.opened(store) as channel:
            await tile_store.delete(channel, claims)

    if not stay and (others := blocking(lambda interrupts: running())):
        raise JobError(f"the same command runs already over {store}, as process {others[0].process}", remedy="wait until it ends")
    matrices: list[BigMatrix] = []
    is_over = False
    try:
        with claimed(store, claims, pool):
            for n, (source, tile) in enumerate(zip(sources, tiles, strict=True)):
                matrices.append(source.tiles(tile, store=store, name=f"{name}-{n}"))
            yield matrices
        is_over = True
    except MatrixError:
        is_over = True
        raise
    finally:
        if is_over:
            for matrix in [] if stay else matrices:
                matrix.delete()
            blocking(lambda interrupts: released())


def command_name(command: str, paths: Sequence[Path], tiles: Sequence[tuple[int, int]]) -> str:
    """Name of what a command stores: the same for the same command, files and tiles, so that it goes on where it was interrupted.

    Args:
        command: `cholesky` and so on.
        paths: of matrices. A file that was written since, by size or times, is another one.
        tiles: shapes of their tiles.
    """
    from ephemeron.linalg.execution.claims import COMMAND

    digest = hashlib.sha256(repr((platform.node(), command, list(tiles))).encode())
    for path in paths:
        for part in sorted(path.rglob("*")) if path.is_dir() else [path]:
            stat = part.stat()
            digest.update(repr((str(part.resolve()), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)).encode())
    return f"{COMMAND}-{digest.hexdigest()[:16]}"


def kept_name(pool: FunctionExecutor) -> str:
    """The same for a command that is given again on another machine: its tiles belong to the run."""
    return f"{pool.queue[1]}.tiles"


def keep_tiles(launch: Launch, paths: Sequence[Path], matrices: Sequence[BigMatrix], out: Path) -> None:
    """Has a command that is given again on another machine read the tiles of its inputs, and write its results for this one.

    Args:
        launch: of the command.
        paths: of the files from which the matrices were stored.
        matrices: inputs.
        out: file or folder of the results.
    """
    for number, (path, matrix) in enumerate(zip(paths, matrices, strict=True)):
        content = json.dumps([matrix.stored.store, matrix.stored.name]).encode()
        launch.keep(str(path), f"{number}{path.suffix}{KEPT}", content)
    launch.outputs[str(out)] = out


def leave_tiles(pool: FunctionExecutor, matrices: Sequence[BigMatrix]) -> None:
    """Has tiles of a command that was given again deleted when its results are saved."""
    from ephemeron.executor.programs import leave_for_later
    from ephemeron.linalg.matrices.lifetimes import disown

    for each in matrices:
        disown(each.stored.store, each.stored.name)
    leave_for_later(pool.folder, matrices[0].stored.store, [f"{each.stored.name}/" for each in matrices])


def kind_of(path: Path) -> str:
    """Kind of results in a folder, where the user does not say it: that of an input."""
    return "zarr" if (path.with_suffix("") if path.suffix == KEPT else path).suffix == ".zarr" else "npy"


def write_results(made: dict[str, Any], out: Path, kind: str) -> dict[str, str]:
    """Writes results: one to a file, several into a folder."""
    import numpy as np

    from ephemeron.linalg import BigMatrix

    several = len(made) > 1
    if several:
        out.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, result in made.items():
        path = out / f"{name}.{kind if isinstance(result, BigMatrix) else 'npy'}" if several else out
        files[name] = str(path)
        if not isinstance(result, BigMatrix):
            np.save(path, result)
        elif path.suffix == ".zarr":
            result.to_zarr(path)
        else:  # a mapped file changes without a trace until it is whole
            part = path.with_name(f"{path.name}.part")
            result.to_npy(part)
            part.replace(path)
    return files


def check_out(out: Path, results: int) -> None:
    """Refuses what could not be written, before anything starts."""
    from ephemeron.errors import JobError

    if results > 1 and out.suffix in (".npy", ".zarr"):
        raise JobError(f"--out {out} is one file, and there are {results} results", remedy="give a folder")
    if results == 1 and out.suffix not in (".npy", ".zarr"):
        raise JobError(f"--out {out} is neither .npy nor .zarr", remedy=f"use {out}.npy")
    if out.suffix == ".zarr" and out.exists():
        raise JobError(f"--out {out} is there already", remedy="give another name, or remove it first")
    if not out.resolve().parent.is_dir():
        raise JobError(f"--out {out}: there is no folder {out.resolve().parent}")
