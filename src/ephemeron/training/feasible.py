"""What can be refused before anything is started: sound bounds only, so that nothing feasible is refused.

Each check names the limit that binds. Bounds, not predictions: a run that passes may still miss its deadline.
"""

from __future__ import annotations

import json

from ephemeron.errors import PlanInfeasible
from ephemeron.job import Configuration, Job
from ephemeron.performance.bounds import iteration_lower_bound_s
from ephemeron.platforms.base import Call, Limits
from ephemeron.units import MIB

RUNTIME_MB = 190
"""Resident megabytes of a function that has imported PyTorch and done nothing (measured, torch 2.13 CPU: 230)."""


def check_memory(
    configuration: Configuration, *, model_bytes: int, optimizer_copies: int, data_bytes: int, limits: Limits
) -> None:
    """Quota within the platform's range, and at least runtime + parameters, gradients, optimiser and data.

    Raises:
        PlanInfeasible: binding is `memory`.
    """
    quota = configuration.memory_mb
    if not limits.memory_min_mb <= quota <= limits.memory_max_mb:
        raise PlanInfeasible(
            f"memory quota {quota} MB is not between {limits.memory_min_mb} and {limits.memory_max_mb} MB",
            binding="memory",
        )
    if (quota - limits.memory_min_mb) % limits.memory_step_mb:
        raise PlanInfeasible(f"memory quota {quota} MB is not a step of {limits.memory_step_mb} MB", binding="memory")
    # parameters, gradients, and one merged vector, beside the optimiser's own copies
    needed = RUNTIME_MB + (model_bytes * (3 + optimizer_copies) + data_bytes) / MIB
    if needed > quota:
        raise PlanInfeasible(f"a function needs at least {needed:.0f} MB, its quota is {quota} MB", binding="memory")


def check_call(call: Call, configuration: Configuration, limits: Limits) -> None:
    """Payload, lifetime and concurrency.

    Raises:
        PlanInfeasible: binding is `payload`, `lifetime` or `concurrency`.
    """
    size = len(json.dumps(call.to_payload()))
    if size > limits.payload_bytes:
        raise PlanInfeasible(f"a call of {size} bytes is over the platform's {limits.payload_bytes}", binding="payload")
    if configuration.lifetime_s > limits.lifetime_s:
        raise PlanInfeasible(
            f"lifetime {configuration.lifetime_s:g} s is over the platform's {limits.lifetime_s:g} s",
            binding="lifetime",
        )
    if configuration.workers > limits.concurrency:
        raise PlanInfeasible(
            f"{configuration.workers} workers are more than the platform's concurrency of {limits.concurrency}",
            binding="concurrency",
        )


def check_time(
    job: Job, configuration: Configuration, *, iterations: int, model_bytes: int, latency_s: float,
    bandwidth_mb_s: float | None, compute: dict[str, float] | None,
) -> None:  # fmt: skip
    """Deadline and lifetime against what the network and the compute model cannot undercut.

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
    if each > configuration.lifetime_s:
        raise PlanInfeasible(
            f"one iteration needs at least {each:.3g} s, a function lives {configuration.lifetime_s:g} s",
            binding="lifetime",
        )
