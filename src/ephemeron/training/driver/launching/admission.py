"""Checks of memory, time and platform limits before anything is started.

The checks are lower bounds, so nothing feasible is refused, and a run that passes may still miss its deadline. Each names the
limit that binds.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

from ephemeron.errors import InvocationRefused, PlanInfeasible
from ephemeron.functions.async_invoke.provider import CapacityRequest, Provider, RunHandle, Settings
from ephemeron.functions.base import Call, Limits
from ephemeron.functions.validation import check_call as platform_check
from ephemeron.functions.world import ComputeModel
from ephemeron.training.job import Configuration, Job
from ephemeron.training.planner.model.bounds import RUNTIME_MB, SHORTER_EVALUATIONS, fewest_stages, iteration_lower_bound_s
from ephemeron.units import MB, MIB


def admit(where: Provider[Any], c: Configuration, settings: Settings, secrets: dict[str, str]) -> tuple[Configuration, Limits]:
    """The configuration with the memory and timeout of a cloud's function, and the cloud's limits: see `Provider.admit`."""
    request, limits = where.admit(_capacity(c), settings, secrets)
    return dataclasses.replace(c, memory_mb=request.memory_mb, function_timeout_s=request.lifetime_s), limits


def make_handle(c: Configuration, *, run: str, run_dir: Path, channel: str, since: float, starting: bool) -> RunHandle:
    """Description of a run for the cloud that opens its calls."""
    return RunHandle(run=run, run_dir=run_dir, capacity=_capacity(c), channel=channel, since=since, starting=starting)


def _capacity(c: Configuration) -> CapacityRequest:
    return CapacityRequest(workers=c.workers, memory_mb=c.memory_mb, lifetime_s=c.function_timeout_s, channel=c.store)


def check_call(call: Call, *, workers: int, limits: Limits) -> None:
    """Checks the platform's own limits: memory range, timeout, payload, concurrency.

    Raises:
        PlanInfeasible: binding is `memory`, `lifetime`, `payload` or `concurrency`.
    """
    try:
        platform_check(call, limits)
    except InvocationRefused as e:
        raise PlanInfeasible(str(e), binding=e.binding) from None
    if workers > limits.concurrency:
        raise PlanInfeasible(
            f"{workers} workers are more than the platform's {limits.concurrency}{limits.more and f': {limits.more}'}",
            binding="concurrency",
        )


def check_memory(quota_mb: int, *, model_bytes: int, optimizer_copies: int, data_bytes: int, most_mb: float = math.inf) -> None:
    """Checks that runtime, parameters, gradients, one merged vector, the optimiser's copies and the data fit the quota.

    Args:
        quota_mb: of each function.
        most_mb: the largest quota that the platform gives.

    Raises:
        PlanInfeasible: binding is `memory`.
    """
    needed = RUNTIME_MB + (model_bytes * (3 + optimizer_copies) + data_bytes) / MIB
    if needed > quota_mb:
        parts = fewest_stages(
            model_bytes * (3 + optimizer_copies) / MIB, fixed_mb=RUNTIME_MB + data_bytes / MIB, most_mb=min(quota_mb, most_mb)
        )
        split = None if parts is None else f"split it: --stages {parts}"
        if needed > most_mb:
            raise PlanInfeasible(
                f"{needed:.0f} MB do not fit one function of at most {most_mb:.0f} MB; {split or 'use a smaller model'}", binding="memory"
            )
        raise PlanInfeasible(
            f"a function needs at least {needed:.0f} MB, its quota is {quota_mb} MB; use a larger --memory-mb"
            + (f", or {split}" if split else ""),
            binding="memory",
        )


def check_time(
    job: Job,
    configuration: Configuration,
    *,
    iterations: int,
    model_bytes: int,
    latency_s: float,
    bandwidth_mb_s: float | None,
    compute: ComputeModel | None,
    tested: int = 0,
) -> None:
    """Checks deadline and function timeout against lower bounds of the network and the compute model.

    Args:
        tested: samples that a function evaluates; 0: it does not.

    Raises:
        PlanInfeasible: binding is `deadline` or `lifetime`.
    """
    each = iteration_lower_bound_s(
        configuration, model_bytes=model_bytes, latency_s=latency_s, bandwidth_mb_s=bandwidth_mb_s, compute=compute
    )
    deadline = job.limits.deadline_s
    if deadline is not None and each * iterations > deadline:
        raise PlanInfeasible(
            f"{iterations} iterations of at least {each:.3g} s need {each * iterations:.3g} s, the deadline is {deadline:g} s",
            binding="deadline",
        )
    if each > configuration.function_timeout_s:
        raise PlanInfeasible(
            f"one iteration needs at least {each:.3g} s, the function timeout is {configuration.function_timeout_s:g} s", binding="lifetime"
        )
    if compute is not None and tested:
        loading_s = latency_s + (model_bytes / (bandwidth_mb_s * MB) if bandwidth_mb_s else 0.0)
        evaluation_s = loading_s + compute.seconds(tested / 3, configuration.memory_mb)
        if evaluation_s > configuration.function_timeout_s:
            raise PlanInfeasible(
                f"loading and the evaluation of {tested} samples need at least {evaluation_s:.3g} s, the function timeout is "
                f"{configuration.function_timeout_s:g} s; {SHORTER_EVALUATIONS}",
                binding="lifetime",
            )
