"""A plan made from a profile and limits: search, reasons, comparison. Pure; nothing is run and nothing is paid for."""

from __future__ import annotations

import dataclasses
import datetime
import time
from collections.abc import Callable, Sequence
from itertools import islice
from pathlib import Path

from ephemeron.prices import MICROVM, age_warning, load_link_prices, load_prices
from ephemeron.training.job import Target
from ephemeron.training.job.convergence import HAP_EPOCHS_FACTOR, outside_region
from ephemeron.training.planner.answers import PlanAnswers
from ephemeron.training.planner.model.builtin import priced, with_link_prices
from ephemeron.training.planner.model.exchange import ExecutionOptions
from ephemeron.training.planner.model.prediction import Prediction
from ephemeron.training.planner.model.profile import PlatformProfile, Profile
from ephemeron.training.planner.plan import (
    Alternative,
    Choice,
    HapEpochs,
    MachineEstimate,
    Plan,
    PlanLimits,
    PlanSource,
    Predicted,
    SearchReport,
)
from ephemeron.training.planner.reasons import bound_by, by_channel, decisive, infeasible, to_compare, too_many_at_once
from ephemeron.training.planner.search.branch_and_bound import predictions_of
from ephemeron.training.planner.search.pareto import Candidate, SearchResult
from ephemeron.training.planner.search.space import Space, make_space
from ephemeron.training.planner.uncertainty import extrapolated, resampled, sources_of
from ephemeron.training.planner.vm_baseline import beyond, few, gpus, on_all
from ephemeron.units import duration

FRONT_POINTS = 60
"""Largest number of points of a plan's front; a longer one is thinned evenly."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlanRequest:
    """Limits, objective and fixed choices of a plan. None: left open."""

    epochs: int = 1
    """Under BSP; HAP gets `hap_epochs`."""
    hap_epochs_factor: float | None = None
    """Epochs that HAP needs for BSP's accuracy, divided by BSP's; None: the measured factor."""
    optimizer: Target | None = None
    """The job's, for a warning where HAP was not tested with it."""
    limits: PlanLimits = dataclasses.field(default_factory=PlanLimits)
    minimise: str = "cost"
    """`cost` or `time`."""
    search: str = "exact"
    pattern: str | None = None
    sync: str | None = None
    compression: str = "none"
    """`any`: also the lossy ones."""
    lifetime_s: float | None = None
    checkpoint_every: int = 25
    local_steps: int = 1
    """Batches of a function between two exchanges: given, not searched, since they change what is learned."""
    workers: int | None = None
    memory_mb: int | None = None
    memory_step_mb: int | None = None
    most_workers: int = 256
    memory_max_mb: int | None = None

    @property
    def hap_factor(self) -> float:
        """Factor of epochs under HAP, given or measured."""
        return HAP_EPOCHS_FACTOR if self.hap_epochs_factor is None else self.hap_epochs_factor

    @property
    def hap_epochs(self) -> int:
        """Epochs of HAP that are planned where BSP has `epochs`, rounded."""
        return max(self.epochs, round(self.epochs * self.hap_factor))


def terms_of(wish: PlanRequest) -> list[ExecutionOptions]:
    """Every combination of named choices that the wish leaves open."""
    patterns = ["k-reduce", "pipelined", "standalone", "parameter-server"] if wish.pattern is None else [wish.pattern]
    compressions = ["none", "bf16", "int8"] if wish.compression == "any" else [wish.compression]
    found = []
    for pattern in patterns:
        both = pattern in ("k-reduce", "all-reduce")
        syncs = (["bsp", "hap"] if both else ["bsp"]) if wish.sync is None else [wish.sync]
        for sync in syncs:
            if sync == "hap" and not both:
                continue
            for compression in compressions:
                if compression != "none" and pattern in ("standalone", "parameter-server"):
                    continue
                found.append(
                    ExecutionOptions(
                        pattern=pattern,
                        sync=sync,
                        compression=compression,
                        epochs=wish.hap_epochs if sync == "hap" else wish.epochs,
                        lifetime_s=wish.lifetime_s,
                        checkpoint_every=wish.checkpoint_every,
                    )
                )
    return found


def with_prices(platform: PlatformProfile, file: str | Path | None) -> PlatformProfile:
    """The platform at the prices of a file.

    Raises:
        JobError: the file is absent or lacks a value.
    """
    if file is None:
        return platform
    found = priced(platform, load_prices(platform.service, file, platform=platform.name[: len(MICROVM)]))
    return with_link_prices(found, load_link_prices(file))


def make_plan(
    profile: Profile,
    wish: PlanRequest,
    *,
    platforms: Sequence[PlatformProfile] = (),
    prices_file: str | Path | None = None,
    today: datetime.date | None = None,
    front: bool = True,
) -> Plan:
    """The best configuration, proven, with its reasons.

    Everything is asked of one `Search`: the front of time against cost first, from which all other questions start with
    answers that are nearly right.

    Args:
        profile: of workload and platform.
        wish: limits, aim, and what is not left open.
        platforms: several, where the channel is left open; else the profile's own.
        prices_file: instead of the profile's prices, and for the machines to compare with.
        today: for the age of prices.
        front: also list the Pareto front.

    Raises:
        PlanInfeasible: nothing meets the limits; names what binds, and the nearest that would do.
    """
    began = time.perf_counter()
    profile = dataclasses.replace(profile, workload=profile.workload.with_local_steps(wish.local_steps))
    found_on = [with_prices(p, prices_file) for p in (platforms or (profile.platform,))]
    space = make_space(
        profile,
        terms_of(wish),
        limits=wish.limits,
        platforms=found_on,
        memory_step_mb=wish.memory_step_mb,
        most_workers=max(wish.most_workers, wish.workers or 0),
        memory_max_mb=wish.memory_max_mb,
    )
    if wish.workers is not None and wish.workers > space.most_workers:
        least = min(found_on, key=lambda p: p.concurrency)
        raise too_many_at_once(wish.workers, least)
    if wish.workers is not None:
        space = dataclasses.replace(space, only_workers=frozenset([wish.workers]))
    if wish.memory_mb is not None:
        space = dataclasses.replace(space, quotas=space.quotas[space.quotas == wish.memory_mb])
    answers = PlanAnswers(space, wish.limits, wish.minimise)
    found = None if wish.search == "exact" else _baseline(wish.search)(space, wish.limits, minimise=wish.minimise)
    best = answers.best() if found is None else found.best
    if best is None:
        raise infeasible(answers, wish.pattern, wish.lifetime_s)
    nearby = answers.beside(best, workers=wish.workers is None)
    listed = [("front", c) for c in _thinned(answers.front())] if front else []
    shown = [("chosen", best)], to_compare(answers, best), nearby, listed
    all_of = iter(_choices(space, [c for part in shown for _, c in part]))
    (choice,), *others, edge = [list(islice(all_of, len(part))) for part in shown]
    compared, alternatives = (_named(wish, best, part, named) for part, named in zip(shown[1:3], others, strict=True))
    machines = on_all(profile.workload, best, epochs=wish.epochs, file=prices_file)
    binding, reasons = bound_by(answers, best, choice.predicted)
    optimum = answers.best()
    assert optimum is not None
    platform = best.option.platform
    sources = sources_of(profile.fit, platform, measured=platform.name == profile.platform.name)
    doubted = [*edge, *others[0], *others[1]]
    doubt = resampled(sources, choice, doubted, wish.limits, wish.minimise)
    optimal = found is None or found.optimal
    evaluated = answers.search.computed() if found is None else found.evaluated
    return Plan(
        choice=dataclasses.replace(choice, local_steps=wish.local_steps),
        search=SearchReport(
            method="exact" if found is None else found.method,
            evaluated=evaluated,
            pruned=max(0, space.size() - evaluated),
            optimal=optimal,
            gap=0.0 if optimal else best.key(wish.minimise)[0] / optimum.key(wish.minimise)[0] - 1,
            seconds=round(time.perf_counter() - began, 4),
        ),
        minimise=wish.minimise,
        epochs=best.option.terms.epochs,
        hap_epochs=HapEpochs(
            factor=wish.hap_factor, source="measured" if wish.hap_epochs_factor is None else "given", bsp=wish.epochs, hap=wish.hap_epochs
        ),
        limits=dataclasses.replace(wish.limits, max_global_batch=space.largest_global_batch),
        binding=binding,
        compared=compared,
        alternatives=alternatives,
        uncertainty=doubt,
        extrapolated=tuple(extrapolated(platform, choice, profile.workload.model_mb)),
        advice=(
            *decisive(compared),
            *reasons,
            *by_channel(answers, best),
            *_of_hap(wish, choice),
            *_wrong_tool(choice, machines, wish),
            *_warnings(wish, profile, best, today),
        ),
        machines=tuple(few(machines, wish.limits)),
        gpus=tuple(gpus(profile.workload, best, choice, epochs=wish.epochs, file=prices_file)),
        beyond=beyond(profile.workload, best, choice, file=prices_file),
        front=tuple(edge),
        profile=PlanSource(
            workload=profile.workload.name, platform=platform.name, source=platform.source, as_of=platform.as_of, notes=platform.notes
        ),
    )


def _baseline(name: str) -> Callable[..., SearchResult]:
    from ephemeron.training.planner.baselines import METHODS

    return METHODS[name]


def _named(
    wish: PlanRequest, best: Candidate, others: Sequence[tuple[str, Candidate]], choices: Sequence[Choice]
) -> tuple[Alternative, ...]:
    """Choices beside the chosen one: why each is shown, whether it keeps the limits, and their ratios."""
    return tuple(
        Alternative(
            **{f.name: getattr(choice, f.name) for f in dataclasses.fields(choice)},
            why=why,
            within_limits=c.seconds <= wish.limits.seconds and c.cost_usd <= wish.limits.usd,
            time_ratio=c.seconds / best.seconds,
            cost_ratio=c.cost_usd / best.cost_usd,
        )
        for (why, c), choice in zip(others, choices, strict=True)
    )


def _thinned(points: list[Candidate]) -> list[Candidate]:
    if len(points) <= FRONT_POINTS:
        return points
    last = len(points) - 1
    return [points[round(i * last / (FRONT_POINTS - 1))] for i in range(FRONT_POINTS)]


def predicted(p: Prediction) -> Predicted:
    """One candidate's prediction as plain numbers."""
    return Predicted(
        seconds=float(p.seconds),
        cost_usd=float(p.cost_usd),
        memory_mb=float(p.memory_needed_mb),
        iterations=int(p.iterations),
        phases_s={
            "start": float(p.start_s),
            "load": float(p.load_s),
            "compute": float(p.compute_s),
            "upload": float(p.upload_s),
            "aggregate": float(p.aggregate_s),
            "download": float(p.download_s),
            "relay": float(p.relay_s),
        },
        cost={"functions": float(p.functions_usd), "storage": float(p.storage_usd), "requests": float(p.requests_usd)},
        invocations=round(float(p.invocations)),
        puts=round(float(p.puts)),
        gets=round(float(p.gets)),
        polls=round(float(p.polls)),
    )


def _choices(space: Space, candidates: Sequence[Candidate]) -> list[Choice]:
    return [
        Choice(
            workers=c.workers,
            memory_mb=c.memory_mb,
            aggregators=c.aggregators,
            batch_size_aggregator=c.batch,
            batch_size_nonaggregator=c.other_batch if c.workers > c.aggregators else c.batch,
            pattern=c.option.terms.pattern,
            sync=c.option.terms.sync if c.workers > c.aggregators else "bsp",
            channel=c.option.platform.channel,
            compression=c.option.terms.compression,
            predicted=predicted(p),
        )
        for c, p in zip(candidates, predictions_of(space, candidates), strict=True)
    ]


# -- machines -----------------------------------------------------------------------------------------------


def _wrong_tool(choice: Choice, machines: Sequence[MachineEstimate], wish: PlanRequest) -> list[str]:
    p = choice.predicted
    good = [m for m in machines if m.seconds <= wish.limits.seconds and m.cost_usd < p.cost_usd]
    if not good:
        return []
    m = min(good, key=lambda m: (m.kind == "spot", m.arm64 or not m.verified))
    taken = ", unless it is taken away in between" if m.kind == "spot" else ""
    text = (
        f"functions are not the cheapest tool here: one {m.name} would take {duration(m.seconds)} for "
        f"${m.cost_usd:.4g}, against {duration(p.seconds)} for ${p.cost_usd:.4g}{taken}"
    )
    if m.counted_vcpus < m.vcpus:
        text += f" ({m.counted_vcpus:g} of its {m.vcpus:g} vCPUs counted: more were not measured)"
    if m.seconds <= p.seconds:
        return [text + "; it is faster, too"]
    return [text + f"; functions are {m.seconds / p.seconds:.1f} times as fast"]


def _of_hap(wish: PlanRequest, choice: Choice) -> list[str]:
    """Epochs that HAP was planned with, and a warning where its convergence was not tested."""
    if all(terms.sync != "hap" for terms in terms_of(wish)):
        return []
    source = "measured, docs/convergence.md" if wish.hap_epochs_factor is None else "given"
    text = f"hap is planned with {wish.hap_epochs} epochs where bsp has {wish.epochs}: factor {wish.hap_factor:g} ({source})"
    if choice.sync != "hap":
        return [text]
    if wish.hap_epochs > wish.epochs:
        text += f"; set epochs = {wish.hap_epochs} for bsp's accuracy"
    outside = outside_region(wish.optimizer, sync=choice.sync, workers=choice.workers) if wish.optimizer else ""
    return [text, *([f"warning: {outside}"] if outside else [])]


def _warnings(wish: PlanRequest, profile: Profile, best: Candidate, today: datetime.date | None) -> list[str]:
    found = []
    as_of = best.option.platform.as_of
    if as_of:
        old = age_warning(as_of, today or datetime.date.today())
        if old is not None:
            found.append(f"warning: {old}")
    p = best.option.platform
    if p.burst and best.workers > p.burst:
        found.append(
            f"{best.workers:,} functions are more than the burst limit of {p.burst:,} that may start at once: the last begins "
            f"{duration(float(p.start_s(best.workers) - p.start_s(p.burst)))} later, which is counted"
        )
    if wish.limits.max_global_batch is None:
        found.append("no largest global batch was given: larger batches need more epochs to the same loss; set limits.max_global_batch")
    return found


__all__ = ["PlanRequest", "make_plan", "predicted", "terms_of", "with_prices"]
