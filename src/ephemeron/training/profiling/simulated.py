"""The profile of a simulated world: its constants are asked for, not measured.

Where the world has no compute model of its own, the simulator runs the real trainer in this process and divides what it
took by the function's CPU share; so does this. The simulator enforces no memory quota and measures no memory: k and c
are an estimate from what autograd keeps for the backward pass.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from ephemeron.communication.keys import Keys
from ephemeron.data import Sampler, plan_split
from ephemeron.functions.base import Limits
from ephemeron.prices import load_prices
from ephemeron.training.collectives.direct_messages import ONE_PHASE_BYTES
from ephemeron.training.driver.launching.prepare import Prepared
from ephemeron.training.job import Job, Simulation
from ephemeron.training.planner.model.bounds import RUNTIME_MB
from ephemeron.training.planner.model.builtin import priced
from ephemeron.training.planner.model.direct_links import DirectLinks
from ephemeron.training.planner.model.fit import fit_steps
from ephemeron.training.planner.model.profile import PlatformProfile, Profile, QuotaRange, Workload
from ephemeron.training.planner.model.provenance import MemoryProvenance, Provenance, StepProvenance
from ephemeron.training.planner.model.rates import Affine, Transfer
from ephemeron.training.profiling import live
from ephemeron.training.profiling.preparation import prepared_alone
from ephemeron.training.profiling.probe_design import Measurement, Range, step_provenance, steps_of
from ephemeron.training.worker.trainers.factory import build_trainer, open_feed
from ephemeron.units import MB, MIB

UNLIMITED_MB_S = 1e6
LEAST_S = 0.3
"""Spent on each batch."""
TURNS = 3
USUAL = 0.25
"""Quantile taken as the time of a step: other load on this machine only ever makes a step longer."""
KEPT_TWICE = 2.0
"""Activations and their gradients."""
MEMORY_NOTE = "estimated from what autograd keeps: the simulator enforces no memory quota"


def simulated_profile(job: Job, *, channel: str, limits: Limits, on_progress: Callable[[str], None] = lambda text: None) -> Profile:
    """The world of the job's `[simulation]` table, and its model's steps.

    Raises:
        UserError: the job is refused.
    """

    server = channel.startswith(("ps://", "parameter_server"))
    name = "parameter_server" if server else "memory"
    prepared = prepared_alone(job, channel=name, limits=limits, platform="simulated")
    world = job.simulation
    trainer, samples = _trainer(prepared), prepared.spec.samples
    batches = _batches(prepared)
    on_progress(f"steps of {', '.join(map(str, batches))} samples in this process")
    state = sum(a.nbytes for a in trainer.state()[0].values())
    slope, saved = _memory(trainer, samples, batches[-1])
    coefficients, applied, steps = _steps(trainer, samples, batches, world, limits)
    base = RUNTIME_MB + saved + (4 * prepared.model_bytes + state) / MIB + live.data_mb(prepared)
    workload = Workload(
        name=job.name,
        model_mb=prepared.model_bytes / MB,
        a=coefficients["a"],
        b=coefficients["b"],
        m=coefficients["m"],
        memory_slope_mb=slope,
        memory_base_mb=base,
        dataset_mb=live.data_mb(prepared),
        samples=prepared.spec.samples,
        test_samples=prepared.test_samples,
        state_mb=state / MB,
        apply_s=applied,
    )
    fit = Provenance(steps=steps, memory=MemoryProvenance(note=MEMORY_NOTE))
    return Profile(workload=workload, platform=world_profile(world, limits, server=server), fit=fit)


def world_profile(world: Simulation, limits: Limits, *, server: bool = False) -> PlatformProfile:
    """The simulator's constants as a platform."""
    link = Affine(latency_s=world.latency_s, mb_s=world.bandwidth_mb_s or UNLIMITED_MB_S)
    links = DirectLinks(
        latency_s=world.direct_latency_s,
        mb_s=world.direct_bandwidth_mb_s or link.mb_s,
        setup_s=world.direct_setup_s + 2 * world.latency_s + 2 * world.direct_latency_s,
        setup_each_s=world.latency_s,
        failure=world.direct_failure,
        one_phase_mb=ONE_PHASE_BYTES / MB,
        source="constants of the simulated network",
    )
    bare = PlatformProfile(
        links=links,
        name="simulated",
        memory_mb=QuotaRange(min=limits.memory_min_mb, max=limits.memory_max_mb, step=max(limits.memory_step_mb, 64)),
        lifetime_s=limits.lifetime_s,
        cold_start_s=world.cold_start_s,
        warm_start_s=world.warm_start_s,
        price_gb_s=0.0,
        price_invocation=0.0,
        poll_s=0.0,
        parallel=1_000_000,
        channel="server" if server else "objects",
        concurrency=limits.concurrency,
        mb_per_vcpu=limits.mb_per_vcpu,
        transfer=(Transfer(memory_mb=float(limits.memory_min_mb), up=link, down=link),),
        source="the job's [simulation] table: constants of a simulated world, not measurements",
        notes=("the simulator's store waits by itself: no polls",),
    )
    return priced(bare, load_prices("server" if server else "objects"))


def _trainer(prepared: Prepared) -> Any:
    keys = Keys(prepared.spec.run_id)
    data, test = (b"".join(bytes(b) for b in prepared.objects[key]) for key in (keys.data(0), keys.test(0)))
    feed = open_feed(prepared.spec, data, test, folders=prepared.job.code)
    return build_trainer(prepared.spec, 0, folders=prepared.job.code, feed=feed)


def _batches(prepared: Prepared) -> tuple[int, ...]:
    most = max(1, min(prepared.job.limits.max_global_batch or 256, 256, prepared.spec.samples // 2))
    return steps_of(min(8, most), most, 9) if most > 8 else (most,)


def _memory(trainer: Any, samples: int, batch: int) -> tuple[float, float]:
    """k, and the megabytes that are kept for any batch."""
    import torch

    def kept(batch: int) -> float:
        seen: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            seen[tensor.data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        trainer.sampler = Sampler(plan_split(samples, [batch]), 0, 0)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            trainer.compute(0)
        return KEPT_TWICE * sum(seen.values()) / MIB

    small, large = kept(1), kept(batch)
    slope = max(0.0, (large - small) / (batch - 1)) if batch > 1 else 0.0
    return slope, max(0.0, small - slope)


def _steps(
    trainer: Any, samples: int, batches: Sequence[int], world: Simulation, limits: Limits
) -> tuple[dict[str, float], float, StepProvenance]:
    """a, b, m; CPU seconds of the optimiser's step; and how they came about."""
    if world.compute is not None:
        given = dataclasses.asdict(world.compute)
        return given, 0.0, StepProvenance(given=True, half_width=0.0, kept_out_error=0.0)

    one_vcpu = round(limits.mb_per_vcpu)
    applied: list[float] = []
    seconds: dict[int, list[float]] = {batch: [] for batch in batches}
    for batch in [*batches] * TURNS:
        trainer.sampler = Sampler(plan_split(samples, [batch]), 0, 0)
        compute = partial(trainer.compute, 0)
        vector = np.zeros_like(compute().vector)
        end = time.perf_counter() + LEAST_S / TURNS
        while len(seconds[batch]) < 2 or time.perf_counter() < end:
            began = time.perf_counter()
            compute()
            seconds[batch].append(time.perf_counter() - began)
            began = time.perf_counter()
            trainer.apply(vector)
            applied.append(time.perf_counter() - began)
    cells = []
    for batch, took in seconds.items():
        quick, middle = np.quantile(took, [USUAL, 0.5])
        spread = float((middle - quick) / quick) / len(took) ** 0.5
        cells.append(Measurement(batch=batch, memory_mb=one_vcpu, seconds=float(quick), spread=spread, steps=len(took)))
    # A share of the CPU divides the time: a·(B + b)/M, with m = 0.
    kept_out = cells[2::3] if len(cells) > 5 else []
    used = [c for c in cells if c not in kept_out]
    fitted = fit_steps([c.batch for c in used], [c.memory_mb for c in used], [c.seconds for c in used], spread=[c.spread for c in used])
    over = Range(batches=tuple(batches), quotas=(one_vcpu,))
    report = step_provenance(fitted, used, kept_out, over, None, "measured in this process")
    return {"a": fitted.a, "b": fitted.b, "m": fitted.m}, float(np.quantile(applied, USUAL)), report
