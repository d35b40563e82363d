"""`ephemeron linalg`: factorisations, products and equations of matrices in NPY files, on functions."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ephemeron.executor import FunctionExecutor
    from ephemeron.linalg import BigMatrix
    from ephemeron.linalg.execution.report import LinalgReport

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.group()
def linalg() -> None:
    """Compute with large matrices on functions.

    \b
    ephemeron linalg cholesky A.npy --out L.npy
    ephemeron linalg solve A.npy B.npy --out X.npy --platform aws --channel s3://bucket/matrices
    ephemeron linalg qr A.npy --out factors        # writes factors/Q.npy and factors/R.npy

    A matrix is cut into tiles, each an object of the channel; a task reads some tiles, computes, and writes others. A function that
    dies costs the tasks that it was computing.
    """


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in reversed(
        (
            click.option("--out", required=True, type=click.Path(path_type=Path), help="NPY file of the result; a folder where there are several."),
            click.option("--tile", type=click.IntRange(min=1), help="Rows and columns of a tile.  [default: by size, memory and speed]"),
            click.option("--platform", default="local", show_default=True, help="Where functions run."),
            click.option("--channel", help="Address of the store for tiles, such as s3://bucket/prefix.  [default: a folder of this machine]"),
            click.option("--workers", type=click.IntRange(min=1), help="Functions at once.  [default: cores of this machine, 100 elsewhere]"),
            click.option("--memory-mb", type=click.IntRange(min=1), help="Memory of a function.  [default: one vCPU's]"),
            click.option("--budget-usd", type=click.FloatRange(min=0, min_open=True), help="Cost at which the computation is ended."),
            click.option("--json", "as_json", is_flag=True, help="Print figures as one line of JSON."),
        )
    ):  # fmt: skip
        command = option(command)
    return command


@linalg.command("cholesky")
@click.argument("a", metavar="A.npy", type=_FILE)
@_options
def cholesky_command(a: Path, **options: Any) -> None:
    """Lower L with L Lᴴ = A, for a positive definite A."""
    _compute([a], lambda la, pool, m: {"L": la.cholesky(m[0], executor=pool)}, **options)


@linalg.command("matmul")
@click.argument("a", metavar="A.npy", type=_FILE)
@click.argument("b", metavar="B.npy", type=_FILE)
@_options
def matmul_command(a: Path, b: Path, **options: Any) -> None:
    """The product A B."""
    _compute([a, b], lambda la, pool, m: {"C": la.matmul(m[0], m[1], executor=pool)}, **options)


@linalg.command("solve")
@click.argument("a", metavar="A.npy", type=_FILE)
@click.argument("b", metavar="B.npy", type=_FILE)
@click.option(
    "--positive-definite", is_flag=True, help="A is positive definite: Cholesky instead of LU, half the work."
)
@_options
def solve_command(a: Path, b: Path, positive_definite: bool, **options: Any) -> None:
    """X with A X = B."""
    how = "positive definite" if positive_definite else "general"
    _compute([a, b], lambda la, pool, m: {"X": la.solve(m[0], m[1], assume_a=how, executor=pool)}, **options)


@linalg.command("lu")
@click.argument("a", metavar="A.npy", type=_FILE)
@_options
def lu_command(a: Path, **options: Any) -> None:
    """p, L and U with A[p] = L U, by tournament pivoting."""
    _compute([a], lambda la, pool, m: dict(zip("pLU", la.lu(m[0], executor=pool), strict=True)), **options)


@linalg.command("qr")
@click.argument("a", metavar="A.npy", type=_FILE)
@_options
def qr_command(a: Path, **options: Any) -> None:
    """Q and R with A = Q R, for an A with at least as many rows as columns."""
    _compute([a], lambda la, pool, m: dict(zip("QR", la.qr(m[0], executor=pool), strict=True)), tall=True, **options)


@linalg.command("svd")
@click.argument("a", metavar="A.npy", type=_FILE)
@_options
def svd_command(a: Path, **options: Any) -> None:
    """U, s and Vh with A = U diag(s) Vh, for a tall A."""
    names = ("U", "s", "Vh")
    _compute([a], lambda la, pool, m: dict(zip(names, la.svd(m[0], executor=pool), strict=True)), tall=True, **options)


def _compute(
    inputs: list[Path], work: Callable[[Any, FunctionExecutor, list[BigMatrix]], dict[str, Any]], *, out: Path, tile: int | None,
    platform: str, channel: str | None, workers: int | None, memory_mb: int | None, budget_usd: float | None, as_json: bool,
    tall: bool = False,
) -> None:  # fmt: skip
    import numpy as np

    from ephemeron import linalg as functions
    from ephemeron.errors import JobError
    from ephemeron.executor import FunctionExecutor
    from ephemeron.linalg.matrices.tile_size import tile_size

    try:
        arrays = [np.load(path, mmap_mode="r", allow_pickle=False) for path in inputs]
    except (OSError, ValueError) as e:
        raise JobError(f"a matrix cannot be read: {e}", remedy="give NPY files, as numpy.save writes them") from None
    if any(array.ndim != 2 or not array.size for array in arrays):
        raise JobError(f"{inputs[0]} is no matrix", remedy="give NPY files with two dimensions")
    rows, columns = arrays[0].shape
    with (
        FunctionExecutor(
            platform, channel=channel or "folder", max_workers=workers, memory_mb=memory_mb, budget_usd=budget_usd,
            progress=False if as_json else None,
        ) as pool,
        tempfile.TemporaryDirectory(prefix="ephemeron-matrices-") as folder,
    ):  # fmt: skip
        edge = tile or tile_size(rows, columns, arrays[0].dtype.itemsize, workers=pool.max_workers)
        shape = (max(edge, columns), columns) if tall and columns <= 2 * edge else (edge, edge)
        store = channel or Path(folder).resolve().as_uri()
        matrices = [
            functions.BigMatrix.from_numpy(array, tile=shape if n == 0 else edge, store=store)
            for n, array in enumerate(arrays)
        ]
        try:
            made = work(functions, pool, matrices)
            files = _write(made, out)
            report = next(
                m.report for m in made.values() if isinstance(m, functions.BigMatrix) and m.report is not None
            )
        finally:
            for matrix in matrices:
                matrix.delete()
        for matrix in made.values():
            if isinstance(matrix, functions.BigMatrix):
                matrix.delete()
    _show(report, files, as_json=as_json)


def _write(made: dict[str, Any], out: Path) -> dict[str, str]:
    """Writes results: one to a file, several into a folder."""
    import numpy as np

    from ephemeron.errors import JobError

    several = len(made) > 1
    if several and out.suffix == ".npy":
        raise JobError(f"--out {out} is one file, and there are {len(made)} results", remedy="give a folder")
    if several:
        out.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, result in made.items():
        path = out / f"{name}.npy" if several else out
        files[name] = str(path)
        if isinstance(result, np.ndarray):
            np.save(path, result)
        else:
            result.to_npy(path)
    return files


def _show(report: LinalgReport, files: dict[str, str], *, as_json: bool) -> None:
    from ephemeron.config.typed import plain

    if as_json:
        click.echo(json.dumps({**plain(report), "files": files}))
        return
    click.echo(str(report))
    for name, path in files.items():
        click.echo(f"{name}: {path}")
