"""Entry of the functions of `benchmarks.chaos`: the worker, with arithmetic on its own thread and a wall clock with an offset."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
from collections.abc import Callable
from typing import TypeVar

from ephemeron.functions.context import Context
from ephemeron.training.worker.loop import run_worker
from ephemeron.training.worker.request import WorkerRequest
from ephemeron.training.worker.result import WorkerResult

T = TypeVar("T")
SKEW_S, STEP_S, SEED = "EPHEMERON_CHAOS_SKEW_S", "EPHEMERON_CHAOS_STEP_S", "EPHEMERON_CHAOS_SEED"


class _Compute:
    """Trainer whose steps last as long as those of a model; the synthetic trainer's own arithmetic takes microseconds."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    async def __call__(self, work: Callable[[], T], *, samples: float, batches: int = 1) -> T:
        if samples:
            await asyncio.sleep(self._step_s)
        return work()


async def run(ctx: Context, request: WorkerRequest) -> WorkerResult:
    """`run_worker` with a random offset of the wall clock in each invocation, up to the given seconds in either direction."""
    skew_s = float(os.environ.get(SKEW_S, "0"))
    off_s = random.Random(f"{os.environ.get(SEED)}/{ctx.invocation}").uniform(-skew_s, skew_s)
    return await run_worker(
        dataclasses.replace(ctx, compute=_Compute(float(os.environ.get(STEP_S, "0"))), origin=ctx.origin + off_s), request
    )
