"""`ephemeron linalg`: factorisations, products and equations of matrices in NPY, Zarr and Parquet files, on functions."""

from __future__ import annotations

import contextlib
import json
import shutil
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ephemeron.cli.bounds import label_option
from ephemeron.cli.clouds import cloud_settings, place_options, renamed_option, taken
from ephemeron.cli.linalg.files import (
    KEPT,
    check_out,
    command_name,
    keep_tiles,
    kept_name,
    kind_of,
    leave_tiles,
    source_of,
    stored,
    write_results,
)
from ephemeron.cli.map import INTERRUPTED
from ephemeron.cli.predictions import dry_run_option, show_prediction
from ephemeron.cli.runs.commands import detachable
from ephemeron.errors import BudgetReached, MatrixError
from ephemeron.units import human_bytes, human_count, human_seconds

if TYPE_CHECKING:
    from ephemeron.executor import FunctionExecutor
    from ephemeron.linalg import BigMatrix
    from ephemeron.linalg.execution.program_data import LinalgReport
    from ephemeron.linalg.execution.remains import MatrixOnDisk, ProgramRemains
    from ephemeron.linalg.prediction.planner import Prediction

_FILE = click.Path(path_type=Path)


@click.group(short_help="Factor, multiply and solve large matrices.")
def linalg() -> None:
    """Compute with large matrices on functions.

    \b
    ephemeron linalg cholesky A.zarr --out L.zarr
    ephemeron linalg solve A.npy B.npy --out X.npy --platform aws --channel s3://bucket/matrices
    ephemeron linalg qr A.npy --out factors        # writes factors/Q.npy and factors/R.npy

    Matrices are NPY files (.npy), Zarr arrays (.zarr) and Parquet files of numbers (.parquet, read only).
    A matrix is cut into tiles, each an object of the channel; a task reads some tiles, computes, and writes others. A function that
    dies costs the tasks that it was computing; a command that was interrupted goes on when it is given again, if it has a --channel.
    """


def _options(command: Callable[..., Any]) -> Callable[..., Any]:
    command = detachable(command)
    for option in reversed(
        (
            click.option(
                "--out",
                type=click.Path(path_type=Path),
                help=".npy or .zarr of the result; a folder where there are several. Needed but for --dry-run.",
            ),
            click.option(
                "--format", "kind", type=click.Choice(["npy", "zarr"]), help="Of results in a folder.  [default: zarr where A is, else npy]"
            ),
            click.option("--tile", type=click.IntRange(min=1), help="Rows and columns of a tile.  [default: by size, memory and speed]"),
            place_options(channel="a folder of this machine, which is deleted at the end"),
            click.option("--memory-mb", type=click.IntRange(min=1), help="Memory of a function.  [default: one vCPU's]"),
            click.option(
                "--autoscaling-factor",
                type=click.FloatRange(min=0, min_open=True, max=1000),
                default=1.0,
                show_default=True,
                help="Functions for each task that is ready or running.",
            ),
            click.option(
                "--idle-timeout",
                "idle_timeout_s",
                type=click.FloatRange(min=0, max=1e6, max_open=True),
                default=10.0,
                show_default=True,
                metavar="SECONDS",
                help="Time after which a function that finds no task ends.",
            ),
            label_option,
            dry_run_option,
            renamed_option("--predict", "--dry-run", is_flag=True),
            click.option("--json", "as_json", is_flag=True, help="Print figures as one line of JSON."),
        )
    ):
        command = option(command)
    return command


@linalg.command("cholesky")
@click.argument("a", metavar="A", type=_FILE)
@_options
def cholesky_command(a: Path, **options: Any) -> None:
    """Lower L with L Lᴴ = A, for a positive definite A."""
    _compute([a], lambda la, pool, m: {"L": la.cholesky(m[0], executor=pool)}, **options)


@linalg.command("matmul")
@click.argument("a", metavar="A", type=_FILE)
@click.argument("b", metavar="B", type=_FILE)
@_options
def matmul_command(a: Path, b: Path, **options: Any) -> None:
    """The product A B."""
    _compute([a, b], lambda la, pool, m: {"C": la.matmul(m[0], m[1], executor=pool)}, **options)


@linalg.command("solve")
@click.argument("a", metavar="A", type=_FILE)
@click.argument("b", metavar="B", type=_FILE)
@click.option("--positive-definite", is_flag=True, help="A is positive definite: Cholesky instead of LU, half the work.")
@_options
def solve_command(a: Path, b: Path, positive_definite: bool, **options: Any) -> None:
    """X with A X = B."""
    how = "positive definite" if positive_definite else "general"
    _compute([a, b], lambda la, pool, m: {"X": la.solve(m[0], m[1], assume_a=how, executor=pool)}, **options)


@linalg.command("lu")
@click.argument("a", metavar="A", type=_FILE)
@_options
def lu_command(a: Path, **options: Any) -> None:
    """p, L and U with A[p] = L U, by tournament pivoting."""
    _compute([a], lambda la, pool, m: dict(zip("pLU", la.lu(m[0], executor=pool), strict=True)), results=3, **options)


@linalg.command("qr")
@click.argument("a", metavar="A", type=_FILE)
@_options
def qr_command(a: Path, **options: Any) -> None:
    """Q and R with A = Q R, for an A of any shape."""
    _compute([a], lambda la, pool, m: dict(zip("QR", la.qr(m[0], executor=pool), strict=True)), results=2, slim=True, **options)


@linalg.command("svd")
@click.argument("a", metavar="A", type=_FILE)
@click.option("--rank", type=click.IntRange(min=1), help="The largest singular values alone, with a random sample.")
@_options
def svd_command(a: Path, rank: int | None, **options: Any) -> None:
    """U, s and Vh with A = U diag(s) Vh."""

    def work(la: Any, pool: FunctionExecutor, m: list[BigMatrix]) -> dict[str, Any]:
        found = la.svd(m[0], executor=pool) if rank is None else la.randomized_svd(m[0], rank, executor=pool)
        return dict(zip(("U", "s", "Vh"), found, strict=True))

    _compute([a], work, results=3, slim=True, **options)


@linalg.command("eigh")
@click.argument("a", metavar="A", type=_FILE)
@_options
def eigh_command(a: Path, **options: Any) -> None:
    """w and V with A V = V diag(w), for a Hermitian A."""
    _compute([a], lambda la, pool, m: dict(zip("wV", la.eigh(m[0], executor=pool), strict=True)), results=2, **options)


@linalg.command("lstsq")
@click.argument("a", metavar="A", type=_FILE)
@click.argument("b", metavar="B", type=_FILE)
@_options
def lstsq_command(a: Path, b: Path, **options: Any) -> None:
    """X that minimises the norm of A X - B, for an A with at least as many rows as columns; of several the one of least norm."""
    _compute([a, b], lambda la, pool, m: {"X": la.lstsq(m[0], m[1], executor=pool)}, slim=True, **options)


@linalg.command("pca")
@click.argument("a", metavar="A", type=_FILE)
@click.option("--components", "-k", type=click.IntRange(min=1), required=True, help="Number of components.")
@_options
def pca_command(a: Path, components: int, **options: Any) -> None:
    """Principal components of the rows of A: their mean, components, variances and scores."""

    def work(la: Any, pool: FunctionExecutor, m: list[BigMatrix]) -> dict[str, Any]:
        found = la.pca(m[0], components, executor=pool)
        return {name: getattr(found, name) for name in ("mean", "components", "explained_variance", "scores")}

    _compute([a], work, results=4, slim=True, **options)


@linalg.command("clean")
@click.argument("store", required=False)
@click.argument("program", required=False)
@click.option("--results", is_flag=True, help="Unfinished results, too: nothing is left from which to go on.")
@click.option("--yes", is_flag=True, help="Do not ask for confirmation.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object per program. Without --yes nothing is removed.")
def clean_command(store: str | None, program: str | None, results: bool, yes: bool, as_json: bool) -> None:
    """Remove what failed and abandoned programs have left in a STORE of matrices: an address, by default the folder of this user.

    \b
    ephemeron linalg clean
    ephemeron linalg clean s3://bucket/matrices
    ephemeron linalg clean s3://bucket/matrices cholesky-0f3a9c5e7b1d2846

    Lists temporary tiles, tiles of unfinished results, and objects of queues by PROGRAM, and results and matrices without a name whose process has
    ended, then asks. Programs on which functions work, or for which a client waits, are left alone. Looking for functions takes some seconds where the queue is in a store of objects.
    """
    import asyncio

    from ephemeron.config.typed import plain
    from ephemeron.linalg.execution import remains
    from ephemeron.linalg.matrices import tile_store

    address = store or remains.home_store()
    matrices = [] if program else remains.abandoned_matrices(address)
    is_new = store is None and tile_store.is_gone(address)
    found = [] if is_new else asyncio.run(remains.find_remains(address, program))
    abandoned = [each for each in found if not each.running]
    if as_json:
        for each in [*found, *matrices]:
            click.echo(json.dumps(plain(each)))
    else:
        _show_remains(found, matrices, address)
    if program is not None:
        remains.check_abandoned(found)
    if not (abandoned or matrices) or (as_json and not yes):
        return
    if not yes:
        what = [human_count(len(abandoned), "program")] * bool(abandoned) + [
            human_count(len(matrices), "result") + " without an owner"
        ] * bool(matrices)
        click.confirm(f"remove what is left of {' and '.join(what)}?", abort=True)
    asyncio.run(remains.remove_remains(address, abandoned, results=results))
    remains.remove_matrices(matrices)


def _show_remains(found: list[ProgramRemains], matrices: list[MatrixOnDisk], store: str) -> None:
    if not found and not matrices:
        click.echo(f"no program has left anything in {store}")
    for matrix in matrices:
        owner = f", of process {matrix.owner}, which has ended" if matrix.owner else ""
        click.echo(f"{matrix.name}: {matrix.kind}, {human_bytes(matrix.nbytes)}{owner}")
    for each in found:
        click.echo(
            f"{each.program}: {human_count(each.temporary, 'temporary tile')}, "
            f"{human_count(each.unfinished, 'tile')} of {'inputs' if each.are_inputs else 'unfinished results'}, {human_count(each.queued, 'object')} of queues"
            + (f"; it is left alone: {each.running}" if each.running else "")
        )


_Work = Callable[[Any, "FunctionExecutor", "list[BigMatrix]"], "dict[str, Any]"]


def _compute(
    inputs: list[Path], work: _Work, *, out: Path | None, channel: str | None, dry_run: bool, results: int = 1, **options: Any
) -> None:
    """Computes; where that is interrupted, says how to go on."""
    if out is not None:
        check_out(out, results)
    elif not dry_run:
        raise click.UsageError("Missing option '--out'.")
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always", RuntimeWarning)
            _run(inputs, work, out=out or Path(), channel=channel, dry_run=dry_run, **options)
        for each in told:
            click.secho(f"warning: {each.message}", fg="yellow", err=True)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        click.secho(f"interrupted; {_way_on(channel)}", fg="yellow", err=True)
        sys.exit(INTERRUPTED)
    except BudgetReached:
        click.secho(_way_on(channel), fg="yellow", err=True)
        raise
    except MatrixError:
        if channel is not None:
            click.secho(f"`ephemeron linalg clean {channel} --results` removes what was computed", fg="yellow", err=True)
        raise


def _way_on(channel: str | None) -> str:
    if channel is None:
        return "its tiles are lost; with --channel the same command goes on from them"
    return f"the same command goes on from its tiles in {channel}; `ephemeron linalg clean {channel} --results` removes them"


def _run(
    inputs: list[Path],
    work: _Work,
    *,
    out: Path,
    kind: str | None,
    tile: int | None,
    platform: str | None,
    channel: str | None,
    max_workers: int | None,
    memory_mb: int | None,
    budget_usd: float | None,
    autoscaling_factor: float,
    idle_timeout_s: float,
    labels: dict[str, str],
    as_json: bool,
    dry_run: bool,
    slim: bool = False,
    **flags: Any,
) -> None:
    from ephemeron import linalg as functions
    from ephemeron.executor import FunctionExecutor
    from ephemeron.executor.programs import check_size, launch_elsewhere
    from ephemeron.linalg.matrices.lifetimes import disown
    from ephemeron.linalg.matrices.stored import tile_size
    from ephemeron.linalg.prediction.predict import described, predict_work
    from ephemeron.runs import detached

    platform = platform or "local"
    sources = [source_of(path) for path in inputs]
    (rows, columns), dtype = sources[0].shape, sources[0].dtype
    command = click.get_current_context().info_name or "linalg"

    def shapes(edge: int) -> list[tuple[int, int]]:
        first = _slim(rows, columns, edge) if slim else (edge, edge)
        return [first if n == 0 else (first[0], edge) for n in range(len(sources))]

    with (
        FunctionExecutor(
            platform,
            name="linalg",
            channel=channel or "folder",
            max_workers=max_workers,
            memory_mb=memory_mb,
            budget_usd=budget_usd,
            autoscaling_factor=autoscaling_factor,
            idle_timeout_s=idle_timeout_s,
            labels=labels,
            progress=False if as_json else None,
            settings=cloud_settings(platform, taken(flags)),
        ) as pool,
        _tiles_folder(pool) as folder,
    ):

        def predicted(tiles: list[tuple[int, int]]) -> Prediction:
            planned = [
                functions.BigMatrix.planned(source.shape, dtype=source.dtype, tile=shape)
                for source, shape in zip(sources, tiles, strict=True)
            ]
            return predict_work(lambda planner: work(functions, planner, planned), command, pool)

        usual = tile_size(rows, columns, dtype.itemsize, workers=pool.max_workers)
        tiles = shapes(tile or usual)
        prediction = predicted(tiles)
        if tile and not as_json and prediction.seconds > 2 * (better := predicted(shapes(usual))).seconds:
            click.secho(f"note: without --tile about {human_seconds(better.seconds)}, with tiles of {usual} rows", fg="yellow", err=True)
        if dry_run:
            return show_prediction(lambda: described(prediction, pool).within(budget_usd=budget_usd), as_json=as_json)
        if not as_json:
            click.echo(f"predicted: {prediction}", err=True)
        store = channel or folder.resolve().as_uri()
        launch, is_kept = launch_elsewhere(platform), inputs[0].suffix == KEPT
        if launch is not None:
            detached.check_place("tasks", platform, store)
            check_size(int(prediction.output_bytes), "the result of this command", platform)
        name = kept_name(pool) if launch is not None or is_kept else command_name(command, inputs, tiles)
        with stored(sources, tiles, store=store, name=name, pool=pool, stay=is_kept) as matrices:
            if launch is not None:
                keep_tiles(launch, inputs, matrices, out)
            made = work(functions, pool, matrices)
            try:
                files = write_results(made, out, kind or kind_of(inputs[0]))
            except BaseException:  # the same command goes on from its results
                for each in made.values():
                    if isinstance(each, functions.BigMatrix):
                        disown(each.stored.store, each.stored.name)
                raise
            report = next(m.report for m in made.values() if isinstance(m, functions.BigMatrix) and m.report is not None)
        results = [each for each in made.values() if isinstance(each, functions.BigMatrix)]
        if is_kept:
            leave_tiles(pool, [*matrices, *results])
        else:
            for matrix in results:
                matrix.delete()
    _show(report, prediction, files, as_json=as_json)


@contextlib.contextmanager
def _tiles_folder(pool: FunctionExecutor) -> Iterator[Path]:
    """Folder for tiles where there is no --channel: of this process, or of the run where another process goes on with it."""
    if pool.goes_on:
        if pool.platform == "simulated":  # it begins again
            shutil.rmtree(pool.folder / "tiles", ignore_errors=True)
        yield pool.folder / "tiles"
        return
    with tempfile.TemporaryDirectory(prefix="ephemeron-matrices-") as folder:
        yield Path(folder)


def _slim(rows: int, columns: int, edge: int) -> tuple[int, int]:
    """Tiles of a matrix that is much longer in one direction: the whole of the other one."""
    if columns <= 2 * edge and columns < rows:
        return max(edge, columns), columns
    if rows <= 2 * edge and rows < columns:
        return rows, max(edge, rows)
    return edge, edge


def _show(report: LinalgReport, prediction: Prediction, files: dict[str, str], *, as_json: bool) -> None:
    from ephemeron.config.typed import plain

    if as_json:
        click.echo(json.dumps({**plain(report), "predicted": plain(prediction), "files": files}))
        return
    click.echo(str(report))
    for name, path in files.items():
        click.echo(f"{name}: {path}")
