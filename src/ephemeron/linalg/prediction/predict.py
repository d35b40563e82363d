"""`predict`: what a computation will take, before anything starts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from ephemeron.config.typed import plain
from ephemeron.errors import JobError, NotComputed
from ephemeron.executor import FunctionExecutor
from ephemeron.linalg.lazy import Expression
from ephemeron.linalg.matrices.big_matrix import BigMatrix
from ephemeron.linalg.matrices.tile_store import PLANNED
from ephemeron.linalg.prediction.planner import Planner, Prediction
from ephemeron.runs.predictions import Basis, invocations_for, measured_now, price_basis
from ephemeron.runs.predictions import Prediction as RunPrediction
from ephemeron.units import MIB, human_bytes, human_count, human_seconds

PROCESS_MB = 120
"""Memory of a function before its first tile, NumPy and SciPy included."""
TASKS_HELD = 2
"""Tasks whose tiles a function has at once: it reads those of the next one, and writes those of the previous one, while it computes."""


def predict(function: Callable[..., Any] | str, *arguments: Any, executor: FunctionExecutor | None = None, **options: Any) -> Prediction:
    """Tasks, operations, bytes, storage, time and price of a computation, from the shapes of its tiles. Nothing is read or started.

    Numbers of tasks are exact. Time rests on the rate of matrix products of this machine, or one that is assumed for a cloud, and on the
    bandwidth of the store; functions are assumed to be as fast as each other and free of faults.

    Args:
        function: of `ephemeron.linalg`, or its name: `cholesky`.
        arguments: of it; matrices may be views. What expressions take themselves is left out.
        executor: that would run it; None: functions of this machine.
        options: of the function.

    Raises:
        JobError: the function would refuse its arguments, or there is none of that name.
    """
    if isinstance(function, str):
        from ephemeron import linalg

        if function not in linalg.OPERATIONS:
            raise JobError(f"no computation {function!r}", remedy=f"use one of {', '.join(linalg.OPERATIONS)}")
        chosen: Callable[..., Any] = getattr(linalg, function)
    else:
        chosen = function
    planned = [_planned(each) for each in arguments]
    with contextlib.ExitStack() as stack:
        pool = executor or stack.enter_context(FunctionExecutor("local", name="linalg", progress=False))
        return predict_work(lambda planner: chosen(*planned, executor=planner, **options), chosen.__name__, pool)


def described(p: Prediction, executor: FunctionExecutor) -> RunPrediction:
    """The prediction of a computation as that of a run of an executor."""
    is_local = executor.platform == "local"
    speed = "rate of matrix products of this machine" if is_local else "rate of matrix products and bandwidth of a cloud's function"
    return RunPrediction(
        kind="tasks",
        name=f"linalg {p.algorithm}",
        platform=executor.platform,
        seconds=p.seconds,
        cost_usd=p.cost_usd,
        memory_mb=PROCESS_MB + min(TASKS_HELD, p.tasks) * p.task_bytes / MIB,
        quota_mb=executor.memory_mb,
        functions=p.executors,
        invocations=invocations_for(p.executors, p.seconds, executor.function_timeout_s),
        rests_on=(
            Basis(source="model", what="shapes of all tiles, from which numbers of tasks follow exactly"),
            measured_now(speed) if is_local else Basis(source="assumed", what=speed),
            Basis(source="assumed", what=f"memory: {PROCESS_MB} MB and the tiles of {TASKS_HELD} tasks, at least"),
            price_basis(executor.prices),
        ),
        details=plain(p),
        rows=(
            (
                "work",
                f"{human_count(p.tasks, 'task')}, {p.flops / 1e9:.1f} Gflop; at least {human_seconds(p.chain_s)} on any number of functions",
            ),
            (
                "tiles",
                f"{human_bytes(p.bytes_read)} read, {human_bytes(p.bytes_written)} written, "
                f"{human_bytes(p.output_bytes + p.temporary_bytes)} stored at most beside the inputs",
            ),
        ),
    )


def predict_work(work: Callable[[Any], Any], name: str, executor: FunctionExecutor) -> Prediction:
    """The same for a function of an executor that computes with matrices of the store `PLANNED`.

    Args:
        work: is given what stands for the executor.
        name: of the computation.
        executor: that would run it.
    """
    planner = Planner(executor, name)
    with contextlib.suppress(NotComputed):
        work(planner)
    return planner.prediction


def _planned(argument: Any) -> Any:
    if isinstance(argument, Expression):
        return BigMatrix.planned(argument.shape, dtype=argument.dtype, tile=argument.tile)
    if isinstance(argument, BigMatrix):
        return BigMatrix(dataclasses.replace(argument.stored, store=PLANNED))
    return argument
