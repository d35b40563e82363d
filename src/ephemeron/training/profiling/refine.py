"""A profile corrected by what a finished run took. Pure: a profile and events in, a profile out.

A run shows one quota and one or two batch sizes, but under the conditions that count: W functions at once, each waiting
for the others most of the time. A function that waits saves up CPU time, so that at a small quota its steps take less
than probes said, which compute without a pause; and what its bookkeeping takes is seen nowhere else. Hence

- the form of equation 3-12 is kept and scaled (`a`), and so is the optimiser's step;
- `step_s` becomes what is left of an iteration when the model has explained what it can, so that the refined profile
  predicts this run's iterations;
- starts are as this run's were, many at once; memory is raised to the largest peak, and never lowered.

The first iteration of every function (it allocates) and iterations that an evaluation joins are left out.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

import numpy as np

from ephemeron.communication.channels.address import is_direct
from ephemeron.errors import JobError
from ephemeron.events import Ended, Event, Invoked, Progress, RunStarted, Started
from ephemeron.training.planner.model.exchange import PREDICTED, ExecutionOptions
from ephemeron.training.planner.model.prediction import predict
from ephemeron.training.planner.model.profile import PlatformProfile, Profile, Workload
from ephemeron.training.planner.model.provenance import Refinement

LEAST_ITERATIONS = 3


def refine(profile: Profile, events: Iterable[Event]) -> Profile:
    """The profile as the run would have it.

    Args:
        profile: what was measured before.
        events: of a run of the same job on the same platform, in any order.

    Raises:
        JobError: the run is too short to say anything.
    """
    events = list(events)
    started = next((e for e in events if isinstance(e, RunStarted)), None)
    progress: dict[tuple[int, int], list[Progress]] = defaultdict(list)
    for e in events:
        if isinstance(e, Progress):
            progress[e.rank, e.attempt].append(e)
    per_epoch = max(1, started.iterations // max(1, started.epochs)) if started else 1
    ratios, shares, periods = [], [], []
    workload, platform = profile.workload, profile.platform
    quota = float(started.memory_mb) if started else 0.0
    usable = min(quota, workload.vcpus * platform.mb_per_vcpu) if workload.vcpus else quota
    for lived in progress.values():
        lived.sort(key=lambda e: e.iteration)
        for before, e in pairwise(lived):
            if e.iteration % per_epoch == 0 or not e.samples:
                continue  # an evaluation joins in
            spans = [end - start for phase, start, end in e.spans if phase == "compute"]
            if len(spans) == 2:
                shares.append(spans[1])
            if not 1 <= len(spans) <= 2:
                continue
            predicted = float(workload.compute_s(e.samples, usable))
            ratios.append(spans[0] / predicted)
            periods.append(e.t - before.t)
    if started is None or len(ratios) < LEAST_ITERATIONS:
        raise JobError(
            f"the run has {len(ratios)} iterations that can be compared with the profile",
            remedy=f"at least {LEAST_ITERATIONS} are needed, beside the first of each function and those with an evaluation",
        )
    scale = float(np.median(ratios))
    peaks = [(e.peak_memory_mb, e.rank) for e in events if isinstance(e, Ended) and e.peak_memory_mb > 0]
    largest = max((e.samples for p in progress.values() for e in p), default=0)
    short_mb = max((peak for peak, _ in peaks), default=0.0) - float(workload.memory_needed_mb(largest))
    cold, warm = _starts(events)
    share = usable / platform.mb_per_vcpu
    scaled = dataclasses.replace(
        workload,
        a=workload.a * scale,
        memory_base_mb=workload.memory_base_mb + max(0.0, short_mb),
        apply_s=statistics.median(shares) * min(share, 1.0) if shares else workload.apply_s,
        step_s=0.0,
    )
    period = statistics.median(periods)
    explained = _iteration_s(scaled, platform, started, _batches(progress, started))
    refined = dataclasses.replace(scaled, step_s=workload.step_s if explained is None else max(0.0, period - explained))
    placed = dataclasses.replace(
        platform,
        cold_start_s=statistics.median(cold) if cold else platform.cold_start_s,
        warm_start_s=statistics.median(warm) if warm else platform.warm_start_s,
    )
    low, high = (float(np.quantile(ratios, q)) for q in (0.1, 0.9))
    note = Refinement(
        run=started.run_id,
        iterations=len(ratios),
        memory_mb=started.memory_mb,
        a_scaled_by=round(scale, 4),
        a_scale_10_to_90_percent=(round(low, 4), round(high, 4)),
        iteration_s=round(period, 6),
        unexplained_s=None if explained is None else round(period - explained, 6),
        memory_raised_mb=round(max(0.0, short_mb), 1),
        cold_starts=len(cold),
        warm_starts=len(warm),
    )
    fit = dataclasses.replace(profile.fit, refined=(*profile.fit.refined, note))
    return Profile(workload=refined, platform=placed, fit=fit)


def _starts(events: Iterable[Event]) -> tuple[list[float], list[float]]:
    """Seconds from call to code: cold ones of the launch, and warm ones. Later cold ones may have been forked at once."""
    events = list(events)
    invoked = {e.invocation: e for e in events if isinstance(e, Invoked)}
    cold: list[float] = []
    warm: list[float] = []
    for e in events:
        if isinstance(e, Started) and e.invocation in invoked:
            call = invoked[e.invocation]
            if not e.cold or call.reason in ("start", "resume"):
                (cold if e.cold else warm).append(max(0.0, e.t - call.t))
    return cold, warm


def _batches(progress: Mapping[tuple[int, int], Sequence[Progress]], started: RunStarted) -> tuple[int, int]:
    """B^a and B^n: the largest of a partial last iteration and the full ones."""

    def largest(ranks: range) -> int:
        return max((e.samples for (rank, _), lived in progress.items() if rank in ranks for e in lived), default=0)

    aggregating = largest(range(started.aggregators))
    return aggregating, largest(range(started.aggregators, started.workers)) or aggregating


def _iteration_s(workload: Workload, platform: PlatformProfile, started: RunStarted, batches: tuple[int, int]) -> float | None:
    """Predicted seconds of an iteration of this run; None for protocols and channels that the profile does not predict."""
    c = started.configuration
    sync = str(c.get("sync", "bsp"))
    if sync not in PREDICTED:
        return None
    terms = ExecutionOptions(pattern=str(c.get("pattern", "k-reduce")), sync=sync, compression=str(c.get("compression", "none")))
    where = platform.over_links() if is_direct(str(c.get("channel", ""))) else platform
    if where is None:
        return None
    predicted = predict(
        workload,
        where,
        terms,
        workers=started.workers,
        memory_mb=started.memory_mb,
        aggregators=started.aggregators,
        batch=batches[0],
        other_batch=batches[1],
    )
    return float(predicted.iteration_s)
