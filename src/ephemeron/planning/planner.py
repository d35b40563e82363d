"""From a profile and limits to a plan: search, explain, compare. Pure; nothing is run and nothing is paid for."""

from __future__ import annotations

import dataclasses
import datetime
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ephemeron.errors import PlanInfeasible
from ephemeron.performance.bounds import RUNTIME_MB, fewest_stages
from ephemeron.performance.machines import on_machine
from ephemeron.performance.model import Terms
from ephemeron.performance.profile import PlatformProfile, Profile
from ephemeron.planning.plan import Choice, Plan, Predicted, Searched
from ephemeron.planning.search import METHODS, Candidate, Found, evaluate, exact, prediction_of
from ephemeron.planning.space import Limits, Space, make_space
from ephemeron.prices import age_warning, load_machines, load_prices

FRONT_POINTS = 60
"""Of a front that is kept in a plan; a longer one is thinned evenly."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What is asked of a plan. None: left open."""

    epochs: int = 1
    limits: Limits = dataclasses.field(default_factory=Limits)
    minimise: str = "cost"
    """`cost` or `time`."""
    search: str = "exact"
    pattern: str | None = None
    sync: str | None = None
    compression: str = "none"
    """`any`: also the lossy ones."""
    lifetime_s: float | None = None
    checkpoint_every: int = 25
    workers: int | None = None
    memory_mb: int | None = None
    memory_step_mb: int | None = None
    most_workers: int = 256
    memory_max_mb: int | None = None


def terms_of(wish: Wish) -> list[Terms]:
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
                    Terms(
                        pattern=pattern, sync=sync, compression=compression, epochs=wish.epochs,
                        lifetime_s=wish.lifetime_s, checkpoint_every=wish.checkpoint_every,
                    )
                )  # fmt: skip
    return found


def with_prices(platform: PlatformProfile, file: str | Path | None) -> PlatformProfile:
    """The platform at the prices of a file.

    Raises:
        JobError: the file is absent or lacks a value.
    """
    if file is None:
        return platform
    p = load_prices(platform.channel, file)
    return dataclasses.replace(
        platform, price_gb_s=p.gb_second_usd, price_invocation=p.invocation_usd, price_put=p.put_usd,
        price_get=p.get_usd, price_list=p.list_usd, price_delete=p.delete_usd, price_mb=p.byte_usd * 1e6,
        price_server_hour=p.server_hour_usd, as_of=p.as_of,
    )  # fmt: skip


def make_plan(
    profile: Profile, wish: Wish, *, platforms: Sequence[PlatformProfile] = (), prices_file: str | Path | None = None,
    today: datetime.date | None = None, front: bool = True,
) -> Plan:  # fmt: skip
    """The best configuration, proven, with its reasons.

    Args:
        profile: of workload and platform.
        wish: limits, aim, and what is not left open.
        platforms: several, where the channel is left open; else the profile's own.
        prices_file: instead of the profile's prices, and for the machines to compare with.
        today: for the age of prices.
        front: also find the Pareto front.

    Raises:
        PlanInfeasible: nothing meets the limits; names what binds, and the nearest that would do.
    """
    found_on = [with_prices(p, prices_file) for p in (platforms or (profile.platform,))]
    space = make_space(
        profile, terms_of(wish), limits=wish.limits, platforms=found_on, memory_step_mb=wish.memory_step_mb,
        most_workers=wish.most_workers, memory_max_mb=wish.memory_max_mb,
    )  # fmt: skip
    if wish.workers is not None:
        space = dataclasses.replace(space, only_workers=frozenset([wish.workers]))
    if wish.memory_mb is not None:
        space = dataclasses.replace(space, quotas=space.quotas[space.quotas == wish.memory_mb])
    found = METHODS[wish.search](space, wish.limits, minimise=wish.minimise)
    if found.best is None:
        raise _infeasible(space, wish)
    best = found.best
    choice = _choice(space, best)
    machines = _machines(space, best, wish, prices_file)
    edge = _front(space, wish) if front else []
    binding, reasons = _binding(space, wish, best, choice)
    return Plan(
        choice=choice,
        search=Searched(
            method=found.method, seconds=round(found.seconds, 4), evaluated=found.evaluated, pruned=found.pruned,
            optimal=found.optimal, gap=0.0 if found.optimal else _gap(space, wish, best),
        ),
        minimise=wish.minimise,
        limits={"deadline_s": wish.limits.deadline_s, "budget_usd": wish.limits.budget_usd,
                "max_global_batch": space.largest_global_batch},
        binding=binding,
        alternatives=_alternatives(space, wish, best),
        advice=[*reasons, *_wrong_tool(choice, machines, wish), *_warnings(wish, profile, best, today)],
        machines=machines,
        front=[c.to_dict() for c in edge],
        profile={
            "workload": profile.workload.name, "platform": best.option.platform.name,
            "source": best.option.platform.source, "as_of": best.option.platform.as_of,
            "notes": list(best.option.platform.notes),
        },
    )  # fmt: skip


def predicted(space: Space, c: Candidate) -> Predicted:
    """A candidate's prediction, as a value that travels."""
    p = prediction_of(space, c)
    return Predicted(
        seconds=float(p.seconds), cost_usd=float(p.cost_usd), memory_mb=float(p.memory_needed_mb),
        iterations=int(p.iterations),
        phases_s={
            "start": float(p.start_s), "load": float(p.load_s), "compute": float(p.compute_s),
            "upload": float(p.upload_s), "aggregate": float(p.aggregate_s), "download": float(p.download_s),
            "relay": float(p.relay_s),
        },
        cost={"functions": float(p.functions_usd), "storage": float(p.storage_usd), "requests": float(p.requests_usd)},
        invocations=round(float(p.invocations)), puts=round(float(p.puts)), gets=round(float(p.gets)),
        polls=round(float(p.polls)),
    )  # fmt: skip


def _choice(space: Space, c: Candidate) -> Choice:
    t = c.option.terms
    return Choice(
        workers=c.workers, memory_mb=c.memory_mb, aggregators=c.aggregators, batch_size_aggregator=c.batch,
        batch_size_nonaggregator=c.other_batch if c.workers > c.aggregators else c.batch, pattern=t.pattern,
        sync=t.sync if c.workers > c.aggregators else "bsp", channel=c.option.platform.channel,
        compression=t.compression, predicted=predicted(space, c),
    )  # fmt: skip


def _gap(space: Space, wish: Wish, best: Candidate) -> float | None:
    """How far a heuristic's result is from the optimum, proven: the exact search takes less than a second."""
    optimum = exact(space, wish.limits, minimise=wish.minimise).best
    return None if optimum is None else best.key(wish.minimise)[0] / optimum.key(wish.minimise)[0] - 1


# -- reasons ------------------------------------------------------------------------------------------------


def _binding(space: Space, wish: Wish, best: Candidate, choice: Choice) -> tuple[str, list[str]]:
    """What holds the optimum back: a limit, if one does, else the phase that takes longest."""
    reasons = []
    phases = {"compute": "compute", "upload": "upload", "aggregate": "aggregation", "download": "download",
              "relay": "lifetime", "start": "cold start", "load": "loading"}  # fmt: skip
    p = choice.predicted
    longest = max(phases, key=lambda name: p.phases_s[name])
    share = p.phases_s[longest] / p.seconds
    bound = phases[longest]
    if p.cost["requests"] > 0.5 * p.cost_usd:
        bound = "requests"
        reasons.append(f"requests are {p.cost['requests'] / p.cost_usd:.0%} of the cost")
    reasons.append(f"most of the time goes into {phases[longest]}: {share:.0%}")
    limits = wish.limits
    own = best.key(wish.minimise)[0]
    word = "cheaper" if wish.minimise == "cost" else "faster"
    for name, relaxed in (
        ("deadline", dataclasses.replace(limits, deadline_s=None) if limits.deadline_s else None),
        ("budget", dataclasses.replace(limits, budget_usd=None) if limits.budget_usd else None),
    ):
        if relaxed is not None:
            other = exact(space, relaxed, minimise=wish.minimise).best
            if other is not None and other.key(wish.minimise)[0] < own * (1 - 1e-9):
                bound = name
                reasons.insert(0, f"the {name} binds: without it, {_words(other)} would be {word}")
    wider = dataclasses.replace(space, largest_global_batch=min(2 * space.largest_global_batch, space.workload.samples))
    if wider.largest_global_batch > space.largest_global_batch:
        import numpy as np

        step = float(space.batches[-1])
        more = np.unique(np.append(space.batches, np.arange(step, wider.largest_global_batch + 1, 16.0)))
        other = exact(dataclasses.replace(wider, batches=more), limits, minimise=wish.minimise).best
        if other is not None and other.key(wish.minimise)[0] < own * (1 - 1e-3):
            if bound not in ("deadline", "budget"):
                bound = "max_global_batch"
            gain = 1 - other.key(wish.minimise)[0] / own
            reasons.append(
                f"the largest global batch of {space.largest_global_batch} binds: with twice as much it would be {gain:.0%} {word}"
                " per epoch, but might need more epochs"
            )
    return bound, reasons


def _alternatives(space: Space, wish: Wish, best: Candidate) -> list[dict[str, Any]]:
    """How sensitive the choice is."""
    found: list[dict[str, Any]] = []

    def add(why: str, c: Candidate | None) -> None:
        if c is not None:
            within = c.seconds <= wish.limits.seconds and c.cost_usd <= wish.limits.usd
            found.append({"why": why, "within_limits": within, **_choice(space, c).to_dict()})

    others = frozenset(range(1, space.most_workers + 1)) - {best.workers}
    if wish.workers is None:
        another = dataclasses.replace(space, only_workers=others)
        add("next best W", exact(another, wish.limits, minimise=wish.minimise).best)
        for step in (-1, 1):
            w = best.workers + step
            if w >= 1:
                only = dataclasses.replace(space, only_workers=frozenset([w]))
                within = exact(only, wish.limits, minimise=wish.minimise).best
                add(f"{step:+d} worker", within or exact(only, Limits(), minimise=wish.minimise).best)
    quotas = list(map(float, space.quotas))
    i = quotas.index(float(best.memory_mb))
    for step in (-1, 1):
        if 0 <= i + step < len(quotas):
            near = evaluate(space, best.option, best.workers, quotas[i + step], best.aggregators, best.batch)
            add(f"{step:+d} memory step", near)
    return found


def _front(space: Space, wish: Wish) -> list[Choice]:
    points = exact(space, wish.limits, front=True).front
    if len(points) > FRONT_POINTS:
        last = len(points) - 1
        points = [points[round(i * last / (FRONT_POINTS - 1))] for i in range(FRONT_POINTS)]
    return [_choice(space, c) for c in points]


# -- machines -----------------------------------------------------------------------------------------------


def _machines(space: Space, best: Candidate, wish: Wish, file: str | Path | None) -> list[dict[str, Any]]:
    w = space.workload
    batch = best.batch * best.aggregators + best.other_batch * (best.workers - best.aggregators)
    download = float(best.option.platform.seconds("down", w.dataset_mb + w.model_mb, float(best.memory_mb)))
    found = [
        on_machine(w, m, epochs=wish.epochs, batch=batch, mb_per_vcpu=best.option.platform.mb_per_vcpu, download_s=download)
        for m in load_machines(file)
    ]  # fmt: skip
    return sorted((m for m in found if m["fits"]), key=lambda m: (m["cost_usd"], m["seconds"]))


def _wrong_tool(choice: Choice, machines: list[dict[str, Any]], wish: Wish) -> list[str]:
    p = choice.predicted
    good = [m for m in machines if m["seconds"] <= wish.limits.seconds and m["cost_usd"] < p.cost_usd]
    if not good:
        return []
    m = good[0]
    text = (
        f"functions are not the cheapest tool here: one {m['name']} would take {duration(m['seconds'])} for "
        f"${m['cost_usd']:.4g}, against {duration(p.seconds)} for ${p.cost_usd:.4g}"
    )
    if m["seconds"] <= p.seconds:
        return [text + "; it is faster, too"]
    return [text + f"; functions are {m['seconds'] / p.seconds:.1f} times as fast"]


def _warnings(wish: Wish, profile: Profile, best: Candidate, today: datetime.date | None) -> list[str]:
    found = []
    as_of = best.option.platform.as_of
    if as_of:
        old = age_warning(as_of, today or datetime.date.today())
        if old is not None:
            found.append(f"warning: {old}")
    if wish.limits.max_global_batch is None:
        found.append("no largest global batch was given: larger batches need more epochs to the same loss; "
                     "set limits.max_global_batch")  # fmt: skip
    return found


# -- infeasible ---------------------------------------------------------------------------------------------


def _infeasible(space: Space, wish: Wish) -> PlanInfeasible:
    """Which constraint binds, and the nearest relaxation."""
    workload, limits = space.workload, wish.limits
    largest = float(space.quotas[-1]) if len(space.quotas) else 0.0
    least = float(workload.memory_needed_mb(float(space.batches[0])))
    if not space.options:
        return PlanInfeasible(
            f"pattern {wish.pattern!r} cannot run here: no profile has the channel that it needs", binding="channel"
        )
    if least > largest:
        stages = fewest_stages(least - RUNTIME_MB, fixed_mb=RUNTIME_MB, most_mb=largest)
        split = "split it over several functions" if stages is None else f"split it: --stages {stages}"
        return PlanInfeasible(
            f"a batch of {space.batches[0]:.0f} needs {least:,.0f} MB, which do not fit one function of at most "
            f"{largest:,.0f} MB; {split}, or use smaller batches",
            binding="memory",
        )
    free = exact(space, Limits(), minimise="cost").best
    if free is None:
        return PlanInfeasible(
            f"no iteration fits the lifetime of {wish.lifetime_s or space.options[0].platform.lifetime_s:g} s, whatever "
            "the configuration; use smaller batches or a platform with a longer limit",
            binding="lifetime",
        )
    fastest = exact(space, dataclasses.replace(limits, deadline_s=None), minimise="time").best
    if limits.deadline_s is not None and fastest is not None:
        cheapest = exact(space, dataclasses.replace(limits, deadline_s=None), minimise="cost").best
        assert cheapest is not None
        return PlanInfeasible(
            f"the deadline of {duration(limits.deadline_s)} cannot be met: {_words(cheapest)} needs "
            f"{duration(cheapest.seconds)}; {_words(fastest)} {duration(fastest.seconds)} for ${fastest.cost_usd:.4g}",
            binding="deadline",
        )
    cheapest = exact(space, dataclasses.replace(limits, budget_usd=None), minimise="cost").best
    if limits.budget_usd is not None and cheapest is not None:
        return PlanInfeasible(
            f"the budget of ${limits.budget_usd:g} is too small: the cheapest is {_words(cheapest)}, "
            f"{duration(cheapest.seconds)} for ${cheapest.cost_usd:.4g}",
            binding="budget",
        )
    return PlanInfeasible(
        f"deadline and budget exclude each other: the cheapest, {_words(free)}, takes {duration(free.seconds)} for "
        f"${free.cost_usd:.4g}; allow more time or more money",
        binding="budget",
    )


def _words(c: Candidate) -> str:
    plural = "workers" if c.workers > 1 else "worker"
    return f"{c.workers} {plural} of {c.memory_mb:,} MB"


def duration(seconds: float) -> str:
    """`95 -> '95 s'`, `600 -> '10 min'`, `9000 -> '2.5 h'`."""
    if math.isinf(seconds):
        return "for ever"
    if seconds < 120:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.3g} min" if seconds < 7200 else f"{seconds / 3600:.3g} h"


__all__ = ["Found", "Wish", "duration", "make_plan", "predicted", "terms_of", "with_prices"]
