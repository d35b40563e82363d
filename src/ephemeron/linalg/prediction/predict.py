"""`predict`: what a computation will take, before anything starts."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

from ephemeron.errors import JobError, NotComputed
from ephemeron.executor import FunctionExecutor
from ephemeron.linalg.lazy import Expression
from ephemeron.linalg.matrices.big_matrix import BigMatrix
from ephemeron.linalg.matrices.tile_store import PLANNED
from ephemeron.linalg.prediction.planner import Planner, Prediction


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
