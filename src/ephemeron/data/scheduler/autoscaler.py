"""Autoscaling of loaders: more while trainers wait, none when there is nothing to do.

A pure function of a few counters and of its previous state. Grow: when trainers have waited for `grow_after_s` without a pause and
no loader is idle, by half, at least by one. Shrink: after `calm_s` in which no trainer waited and nothing changed, by the smallest
number of loaders that were idle meanwhile. To zero: after `idle_s` without demand. Limits apply at once.

Three rules prevent flapping. A change has `settle_s` to take effect (a cold start) before the number grows again. After any change,
shrinking needs a whole calm period. And a number of loaders at which trainers waited is remembered for `memory_s`, and shrinking
stops above it; so a constant demand is met from above once, and then the number stays.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ephemeron.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class ElasticLimits:
    """Bounds and time constants."""

    most: int
    """Loaders, at most."""
    least: int = 0
    """Loaders while there is something to do."""
    grow_after_s: float = 0.2
    settle_s: float = 2.0
    calm_s: float = 20.0
    memory_s: float = 300.0
    idle_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.least <= self.most or self.most < 1:
            raise JobError(f"least = {self.least} and most = {self.most} loaders are not a range", remedy="give 0 ≤ least ≤ most ≥ 1")
        for name in ("grow_after_s", "settle_s", "calm_s", "memory_s", "idle_s"):
            if getattr(self, name) < 0:
                raise JobError(f"{name} = {getattr(self, name)} is negative", remedy="give seconds")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadCounters:
    """Observation at one moment."""

    wanted: int
    """Tasks that are ready or loading: more loaders than this cannot help."""
    waiting: int
    """Trainers that wait for a batch now."""
    idle: int
    """Loaders without work."""
    concurrency: int
    """Loaders that the platform can run at a time, including those that run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Elastic:
    """The decision and its state. Start with `Elastic()`."""

    target: int = 0
    """Target number of loaders."""
    changed_at: float = float("-inf")
    waiting_since: float | None = None
    wanted_at: float = float("-inf")
    """Time of the last demand."""
    calm_since: float | None = None
    """Time since which no trainer has waited and nothing was changed."""
    idle: int = 0
    """Smallest number of idle loaders since then."""
    too_few: int = 0
    """Largest number of loaders at which trainers waited."""
    too_few_at: float = float("-inf")


def decide(state: Elastic, seen: LoadCounters, limits: ElasticLimits, *, now: float) -> Elastic:
    """The next state, with the new target. May be called at any rate; `now` does not decrease."""
    state = _observe(state, seen, limits, now)
    ceiling = max(0, min(limits.most, seen.concurrency))
    target = min(state.target, ceiling)
    if seen.wanted and target < min(max(limits.least, 1), ceiling):
        target = min(max(limits.least, 1), ceiling)
    elif not seen.wanted and now - state.wanted_at >= limits.idle_s:
        target = 0
    elif seen.idle == 0 and _may_grow(state, limits, now):
        state = replace(state, too_few=max(state.too_few, target), too_few_at=now)
        target = max(target, min(target + max(1, target // 2), ceiling, seen.wanted))
    elif state.calm_since is not None and now - state.calm_since >= limits.calm_s:
        floor = max(limits.least, state.too_few + 1, 1)
        target = min(target, max(floor, target - state.idle))
        state = replace(state, calm_since=now, idle=seen.idle)
    if target == state.target:
        return state
    calm = None if state.waiting_since is not None else now
    return replace(state, target=target, changed_at=now, calm_since=calm, idle=seen.idle)


def _observe(state: Elastic, seen: LoadCounters, limits: ElasticLimits, now: float) -> Elastic:
    if seen.wanted:
        state = replace(state, wanted_at=now)
    if now - state.too_few_at > limits.memory_s:
        state = replace(state, too_few=0)
    if not seen.waiting:
        since = now if state.calm_since is None else state.calm_since
        idle = seen.idle if state.calm_since is None else min(state.idle, seen.idle)
        return replace(state, waiting_since=None, calm_since=since, idle=idle)
    return replace(state, waiting_since=now if state.waiting_since is None else state.waiting_since, calm_since=None)


def _may_grow(state: Elastic, limits: ElasticLimits, now: float) -> bool:
    waited = state.waiting_since is not None and now - state.waiting_since >= limits.grow_after_s
    return waited and now - state.changed_at >= limits.settle_s
