"""Runs a program on functions: names what it makes, publishes the first tasks, waits, and removes temporary tiles."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import inspect
import logging
import time
from collections import Counter
from collections.abc import Mapping, Sequence

from ephemeron.blocking import run as blocking
from ephemeron.config.typed import build
from ephemeron.errors import JobError
from ephemeron.executor import FunctionExecutor
from ephemeron.functions.tasks.model import TaskResult
from ephemeron.linalg.execution.claims import TEMPORARY, claimed
from ephemeron.linalg.execution.program_data import LinalgReport, ProgramData, run_name
from ephemeron.linalg.execution.program_graph import ProgramGraph, TaskTraffic, open_program
from ephemeron.linalg.language.kernel import load_kernel
from ephemeron.linalg.language.program import Program, Role
from ephemeron.linalg.matrices import lifetimes, tile_store
from ephemeron.linalg.matrices.lifetimes import Owners
from ephemeron.linalg.matrices.stored import StoredMatrix, TileFamily, Tiles
from ephemeron.linalg.prediction.program_work import ProgramWork

_log = logging.getLogger(__name__)


def run_program(
    program: Program,
    sizes: Mapping[str, int],
    *,
    inputs: Mapping[str, Tiles],
    outputs: Mapping[str, Tiles],
    executor: FunctionExecutor,
    owners: Owners | None = None,
    checked: Sequence[str] = (),
) -> tuple[dict[str, Tiles], LinalgReport]:
    """Runs a program. One that was interrupted goes on from its tiles when it is called again with the same inputs.

    Args:
        program: checked.
        sizes: numbers of tiles.
        inputs: stored matrices by the program's names.
        outputs: what they will look like, and in which store; their names are made here, from the program and its inputs.
        executor: runs the tasks.
        owners: keep what is made; None: it stays until it is deleted.
        checked: inputs in which a value that is NaN or infinite is refused.

    Returns:
        The outputs, and figures.

    Raises:
        JobError: a size or a matrix is missing.
        TaskFailed: a task failed in all its tries.
    """
    executor.require("linalg")
    code = {name: executor.shipment(load_kernel(path)) for name, path in program.kernels}
    data, whole = blocking(
        lambda interrupts: _prepare(program, sizes, inputs, outputs, {n: s.reference for n, s in code.items()}, executor.tries, checked)
    )
    made: dict[str, Tiles] = {name: data.matrices.get(name) or data.families[name] for name in outputs}
    if whole:
        if owners is not None:
            owners.begin(blocking(lambda interrupts: tile_store.not_kept(made.values())))
        return made, LinalgReport(algorithm=program.name)
    temporaries = TileFamily(store=data.store, name=data.temporaries)
    if owners is not None:
        owners.begin([*made.values(), temporaries])
    local = ProgramGraph(data, program)
    totals = _Totals(_flops(program, sizes, {**inputs, **outputs}) if executor.shows_progress else {})
    began, bill_before = time.perf_counter(), executor.bill().cost_usd
    tasks = local.tasks
    _log.info("%s: %d tasks", program.name, tasks)
    with claimed(data.store, data.temporaries, executor):
        future = executor.run_graph(
            open_program,
            data.to_bytes(),
            local.starts,
            tasks=tasks,
            name=program.name,
            code=list(code.values()),
            on_result=totals.add,
            rate=totals.rate if executor.shows_progress else None,
        )
        try:
            future.result()
        finally:
            future.cancel()
    report = LinalgReport(
        algorithm=program.name,
        tasks=tasks,
        seconds=time.perf_counter() - began,
        core_seconds=totals.seconds,
        bytes_read=totals.read,
        bytes_written=totals.written,
        cost_usd=executor.bill().cost_usd - bill_before,
        resumed=totals.stored,
    )
    blocking(lambda interrupts: _finish(data, made))
    lifetimes.disown(temporaries.store, temporaries.name)
    return made, report


class _Totals:
    """Sums over the results of tasks."""

    def __init__(self, flops: Mapping[int, float]) -> None:
        self.read = self.written = self.stored = 0
        self.seconds = self.flops = 0.0
        self._flops, self._began = flops, time.perf_counter()

    def rate(self) -> str:
        """Floating-point operations in a second, since the start."""
        return f"{self.flops / (time.perf_counter() - self._began) / 1e9:.2f} Gflop/s"

    def add(self, result: TaskResult) -> None:
        traffic = build(TaskTraffic, result.value, where=f"result of {result.id}")
        self.read += traffic.read
        self.written += traffic.written
        self.stored += traffic.stored
        self.seconds += result.compute_s
        self.flops += 0.0 if traffic.stored else self._flops.get(int(result.id.split("-")[1]), 0.0)


def _flops(program: Program, sizes: Mapping[str, int], matrices: Mapping[str, Tiles]) -> dict[int, float]:
    """Operations of a task of each statement, by its line: the mean."""
    statements = ProgramWork(program, sizes, matrices, {}, 8).statements
    tasks, flops = Counter[int](), Counter[int]()
    for s in statements:
        tasks[s.line] += s.tasks
        flops[s.line] += s.tasks * s.flops  # type: ignore[assignment]
    return {line: flops[line] / n for line, n in tasks.items()}


async def _prepare(
    program: Program,
    sizes: Mapping[str, int],
    inputs: Mapping[str, Tiles],
    outputs: Mapping[str, Tiles],
    kernels: Mapping[str, str],
    tries: int,
    checked: Sequence[str],
) -> tuple[ProgramData, bool]:
    """The program as functions read it, and whether its outputs are whole already."""
    wanted = {m.name for m in program.matrices if m.role is not Role.TEMPORARY}
    if missing := sorted(wanted - set(inputs) - set(outputs)):
        raise JobError(f"{program.name} needs a matrix {missing[0]}")
    text, sizes = str(program), program.check_sizes(sizes)
    name = f"{program.name}-{run_name(text, sizes, inputs, kernels=_sources(program), checked=checked)}"
    made: dict[str, Tiles] = {each: _named(matrix, f"{name}-{each}") for each, matrix in outputs.items()}
    store = next(iter(made.values())).store
    async with tile_store.opened(store) as channel:
        whole = [await tile_store.is_whole(channel, matrix) for matrix in made.values()]
        begun = bool(await channel.list(f"{name}-"))
    data = ProgramData(
        text=text,
        kernels=kernels,
        sizes=sizes,
        temporaries=f"{name}{TEMPORARY}",
        store=store,
        matrices={each: m for each, m in {**inputs, **made}.items() if isinstance(m, StoredMatrix)},
        families={each: m for each, m in {**inputs, **made}.items() if isinstance(m, TileFamily)},
        resumes=begun,
        tries=tries,
        checked=tuple(checked),
    )
    return data, all(whole)


def _named(matrix: Tiles, name: str) -> Tiles:
    """An output, whose name follows from its values."""
    if isinstance(matrix, StoredMatrix):
        return dataclasses.replace(matrix, name=name, generation="")
    return dataclasses.replace(matrix, name=name)


def _sources(program: Program) -> dict[str, str]:
    """Digests of the kernels that are not of this package, which may be edited between two runs, by name."""
    found = {}
    for name, path in program.kernels:
        if not path.startswith("ephemeron."):
            with contextlib.suppress(OSError, TypeError):  # there is no source
                source = inspect.getsource(load_kernel(path).function)
                found[name] = hashlib.blake2b(source.encode(), digest_size=8).hexdigest()
    return found


async def _finish(data: ProgramData, made: Mapping[str, Tiles]) -> None:
    """Says that the outputs are whole, then removes what is temporary."""
    for matrix in made.values():
        async with tile_store.opened(matrix.store) as channel:
            await tile_store.describe(channel, matrix)
    async with tile_store.opened(data.store) as channel:
        await tile_store.delete(channel, data.temporaries)
