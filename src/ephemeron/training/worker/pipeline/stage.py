"""The entry `stage`: a worker whose function holds one stage of the model."""

from __future__ import annotations

from ephemeron.functions.context import Context
from ephemeron.training.worker.loop import run_rank
from ephemeron.training.worker.pipeline.step import PipelineStep
from ephemeron.training.worker.request import WorkerRequest
from ephemeron.training.worker.result import WorkerResult


async def run_stage(ctx: Context, request: WorkerRequest) -> WorkerResult:
    """Runs one invocation of a rank that holds a stage, to its end.

    Raises:
        JobError: the run does not divide its model.
    """
    return await run_rank(ctx, request, PipelineStep)
