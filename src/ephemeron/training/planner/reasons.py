"""Reasons of a plan, the alternatives worth considering, and the nearest configurations if none fits."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ephemeron.errors import PlanInfeasible
from ephemeron.training.planner.answers import PlanAnswers
from ephemeron.training.planner.model.bounds import RUNTIME_MB, SHORTER_EVALUATIONS, fewest_stages
from ephemeron.training.planner.model.exchange import exchange
from ephemeron.training.planner.model.profile import PlatformProfile
from ephemeron.training.planner.plan import Alternative, Choice, Predicted
from ephemeron.training.planner.search.pareto import Candidate
from ephemeron.units import duration

PHASES = {
    "compute": "compute",
    "upload": "upload",
    "aggregate": "aggregation",
    "download": "download",
    "relay": "lifetime",
    "start": "cold start",
    "load": "loading",
}
CHANNELS = {"objects": "objects", "cache": "a cache", "server": "a parameter server", "direct": "direct links"}
WORTH_SAYING = 1.1
"""Ratio of time or cost from which on another configuration is another choice."""


def bound_by(answers: PlanAnswers, best: Candidate, p: Predicted) -> tuple[str, list[str]]:
    """The binding constraint of the optimum: a limit, if one binds, else the phase that takes longest."""
    reasons = []
    longest = max(PHASES, key=lambda name: p.phases_s[name])
    bound = PHASES[longest]
    if p.cost["requests"] > 0.5 * p.cost_usd:
        bound = "requests"
        reasons.append(f"requests are {p.cost['requests'] / p.cost_usd:.0%} of the cost")
    reasons.append(f"most of the time goes into {PHASES[longest]}: {p.phases_s[longest] / p.seconds:.0%}")
    minimise = answers.minimise
    own = best.key(minimise)[0]
    word = "cheaper" if minimise == "cost" else "faster"
    for name, limit in (("deadline", "deadline_s"), ("budget", "budget_usd")):
        if getattr(answers.limits, limit) is not None:
            other = answers.without(limit)
            if other is not None and other.key(minimise)[0] < own * (1 - 1e-9):
                bound = name
                reasons.insert(0, f"the {name} binds: without it, {words(other)} would be {word}")
    other = answers.with_wider_batches()
    if other is not None and other.key(minimise)[0] < own * (1 - 1e-3):
        if bound not in ("deadline", "budget"):
            bound = "max_global_batch"
        gain = 1 - other.key(minimise)[0] / own
        reasons.append(
            f"the largest global batch of {answers.space.largest_global_batch} binds: with twice as much it would be "
            f"{gain:.0%} {word} per epoch, but might need more epochs"
        )
    return bound, reasons


def by_channel(answers: PlanAnswers, best: Candidate) -> list[str]:
    """Why this channel: the best over each of the others; and what pairs of functions without a direct link cost."""
    platform = best.option.platform
    found = []
    others = [
        f"over {CHANNELS[name]} nothing keeps the limits"
        if c is None
        else f"over {CHANNELS[name]}, {words(c)} would take {duration(c.seconds)} for ${c.cost_usd:.4g}"
        for name, c in answers.by_channel().items()
        if name != platform.channel
    ]
    if others:
        source = f" ({platform.direct.source})" if platform.direct is not None and platform.direct.source else ""
        own = CHANNELS[platform.channel] + source if best.workers > 1 else "none needed by one function"
        found.append(f"channel: {own}; {'; '.join(others)}")
    links = platform.direct
    if links is not None and links.failure and best.workers > 1:
        e = exchange(
            answers.space.workload,
            platform,
            best.option.terms,
            workers=best.workers,
            aggregators=best.aggregators,
            memory_mb=best.memory_mb,
        )
        found.append(
            f"{100 * links.failure:.3g} % of the pairs are expected to be without a link and to exchange through the store: "
            f"{float(e.puts):.3g} puts and as many gets per iteration"
        )
    return found


def to_compare(answers: PlanAnswers, best: Candidate) -> list[tuple[str, Candidate]]:
    """The few configurations that a person would choose between, within the limits or not, cheapest first.

    The knee is the point of the front that is farthest below the straight line from the cheapest to the fastest, both
    axes logarithmic: before it time is cheap, after it money buys little.
    """
    cheapest, fastest, alone = answers.free("cost"), answers.free("time"), answers.alone()
    found = [("chosen", best)]
    if cheapest is not None and fastest is not None:
        found += [("cheapest", cheapest), *_knee(answers.everything(), cheapest, fastest), ("fastest", fastest)]
    if alone is not None:
        found.append(("one function", alone))
    kept: list[tuple[str, Candidate]] = []
    for why, c in found:
        if all(c.key("cost")[2:] != k.key("cost")[2:] and not _alike(c, k) for _, k in kept):
            kept.append((why, c))
    return sorted(kept, key=lambda pair: (pair[1].cost_usd, pair[1].seconds))


def _knee(front: list[Candidate], cheapest: Candidate, fastest: Candidate) -> list[tuple[str, Candidate]]:
    wide, high = math.log(cheapest.seconds / fastest.seconds), math.log(fastest.cost_usd / cheapest.cost_usd)
    if wide < 0.1 or high < 0.1:
        return []

    def below(c: Candidate) -> float:
        return 1 - math.log(c.seconds / fastest.seconds) / wide - math.log(c.cost_usd / cheapest.cost_usd) / high

    knee = max(front, key=below)
    return [("knee", knee)] if below(knee) > 0.05 else []


def _alike(a: Candidate, b: Candidate) -> bool:
    ratios = a.seconds / b.seconds, a.cost_usd / b.cost_usd
    return all(1 / WORTH_SAYING < r < WORTH_SAYING for r in ratios)


def decisive(compared: Sequence[Alternative]) -> list[str]:
    """The alternative that a person should know of before paying: much cheaper than the choice, with its time."""
    found = []
    chosen = next(c for c in compared if c.why == "chosen").predicted
    for c in compared:
        p = c.predicted
        if c.why in ("cheapest", "one function", "knee") and c.cost_ratio < 1 / WORTH_SAYING:
            late = "" if c.within_limits else ", which the limits forbid"
            found.append(
                f"{_name(c)} would take {duration(p.seconds)} for ${p.cost_usd:.4g}{late}: {c.time_ratio:.2g} times as "
                f"long as the chosen {duration(chosen.seconds)} for ${chosen.cost_usd:.4g}, at {c.cost_ratio:.2g} of its cost"
            )
            break
    return found


def _name(c: Choice) -> str:
    many = f"{c.workers} functions" if c.workers > 1 else "one function"
    return f"{many} of {c.memory_mb:,} MB"


def words(c: Candidate) -> str:
    """`4 workers of 1,024 MB`."""
    plural = "workers" if c.workers > 1 else "worker"
    return f"{c.workers} {plural} of {c.memory_mb:,} MB"


def too_many_at_once(workers: int, platform: PlatformProfile) -> PlanInfeasible:
    """More functions than may run at once."""
    return PlanInfeasible(
        f"{workers:,} functions are more than the {platform.concurrency:,} that may run at once on {platform.name}: have that "
        "quota raised and say so in `concurrency` of the profile, or ask for fewer",
        binding="concurrency",
    )


def infeasible(answers: PlanAnswers, pattern: str | None, lifetime_s: float | None) -> PlanInfeasible:
    """Which constraint binds, and the nearest relaxation: what exceeds the limits least, and by how much."""
    space, limits = answers.space, answers.limits
    workload = space.workload
    if not space.options:
        return PlanInfeasible(f"pattern {pattern!r} cannot run here: no profile has the channel that it needs", binding="channel")
    largest = float(space.quotas[-1]) if len(space.quotas) else 0.0
    least = float(workload.memory_needed_mb(1.0))
    if least > largest:
        stages = fewest_stages(least - RUNTIME_MB, fixed_mb=RUNTIME_MB, most_mb=largest)
        split = "split it over several functions" if stages is None else f"split it: --stages {stages}"
        return PlanInfeasible(
            f"a batch of 1 needs {least:,.0f} MB, which do not fit one function of at most {largest:,.0f} MB; {split}", binding="memory"
        )
    cheapest, fastest = answers.free("cost"), answers.free("time")
    if cheapest is None or fastest is None:
        platform = space.options[0].platform
        life_s = lifetime_s or platform.lifetime_s
        most = float(min(largest, workload.vcpus * platform.mb_per_vcpu) if workload.vcpus else largest)
        widest = min(platform.concurrency or workload.samples, workload.samples)
        evaluation_s = float(workload.evaluation_s(workload.test_samples / widest, most))
        if workload.test_samples and evaluation_s > life_s:
            return PlanInfeasible(
                f"an evaluation takes {duration(evaluation_s)} on each of {widest:,} functions of {most:,.0f} MB, the lifetime is "
                f"{life_s:g} s; {SHORTER_EVALUATIONS}",
                binding="lifetime",
            )
        return PlanInfeasible(
            f"no iteration{' and no evaluation' if workload.test_samples else ''} fits the lifetime of {life_s:g} s in any "
            "configuration; use smaller batches or a platform with a longer limit",
            binding="lifetime",
        )
    deadline, budget = limits.deadline_s, limits.budget_usd
    if deadline is not None and fastest.seconds > deadline:
        return PlanInfeasible(
            f"the deadline of {duration(deadline)} cannot be met: the nearest is {words(fastest)}, {duration(fastest.seconds)} for "
            f"${fastest.cost_usd:.4g}, {_over(fastest.seconds, deadline)} too slow; the cheapest is {words(cheapest)}, "
            f"{duration(cheapest.seconds)} for ${cheapest.cost_usd:.4g}",
            binding="deadline",
        )
    if budget is not None and cheapest.cost_usd > budget:
        return PlanInfeasible(
            f"the budget of ${budget:g} is too small: the cheapest is {words(cheapest)}, {duration(cheapest.seconds)} for "
            f"${cheapest.cost_usd:.4g}, {_over(cheapest.cost_usd, budget)} too dear",
            binding="budget",
        )
    assert deadline is not None
    assert budget is not None
    nearest = min(answers.everything(), key=lambda c: max(c.seconds / deadline, c.cost_usd / budget))
    within_time, within_budget = answers.free("cost", deadline_s=deadline), answers.free("time", budget_usd=budget)
    assert within_time is not None
    assert within_budget is not None
    beyond = [
        f"{_over(x, limit)} too {word}"
        for x, limit, word in ((nearest.seconds, deadline, "slow"), (nearest.cost_usd, budget, "dear"))
        if x > limit
    ]
    return PlanInfeasible(
        f"deadline and budget exclude each other: the nearest to both, {words(nearest)}, takes {duration(nearest.seconds)} for "
        f"${nearest.cost_usd:.4g}, {' and '.join(beyond)}; the deadline takes ${within_time.cost_usd:.4g}, the budget "
        f"{duration(within_budget.seconds)}",
        binding="budget",
    )


def _over(value: float, limit: float) -> str:
    return f"{value / limit - 1:.0%}" if value < 10 * limit else f"{value / limit:.3g} times"
