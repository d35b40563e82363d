"""A plan: the chosen configuration, what it is predicted to take, why, and what else there is. A value that travels."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ephemeron.errors import JobError


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What one configuration is predicted to take."""

    seconds: float
    """From launch to end, cold start included."""
    cost_usd: float
    memory_mb: float
    """Least quota that fits, the larger batch counting."""
    iterations: int
    phases_s: dict[str, float]
    """Seconds of the run on the critical path, by phase: start, load, compute, upload, aggregate, download, relay."""
    cost: dict[str, float]
    """`functions` (GB-seconds), `storage` (bytes and servers), `requests` (invocations, puts, gets, polls)."""
    invocations: int = 0
    puts: int = 0
    gets: int = 0
    polls: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """One configuration and its prediction."""

    workers: int
    memory_mb: int
    aggregators: int
    batch_size_aggregator: int
    batch_size_nonaggregator: int
    pattern: str
    sync: str
    channel: str
    compression: str
    predicted: Predicted

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it; a plan holds many, and `asdict` takes several times as long."""
        p = self.predicted
        predicted = {f.name: getattr(p, f.name) for f in fields(p)}
        predicted |= {"phases_s": dict(p.phases_s), "cost": dict(p.cost)}
        return {n: getattr(self, n) for n in NAMES} | {"predicted": predicted}


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchReport:
    """How the choice was found, and what that proves."""

    method: str
    """`exact`, `two-stage` or `brute-force`."""
    seconds: float
    """For everything that the plan says: the choice, the front, alternatives and reasons."""
    evaluated: int
    """Candidates whose time and cost were computed."""
    pruned: int = 0
    """Candidates that a bound proved worse, or infeasible, without computing them."""
    optimal: bool
    gap: float | None
    """Relative distance that is left to the proven optimum; None: nothing is proven."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What `ephemeron plan` returns."""

    choice: Choice
    search: SearchReport
    minimise: str
    """`cost` or `time`."""
    limits: dict[str, float | None]
    """`deadline_s`, `budget_usd`, `max_global_batch`, as asked."""
    binding: str
    """What bounds it: a limit that holds the optimum back, or else the phase that takes longest."""
    compared: list[dict[str, Any]] = field(default_factory=list)
    """What a person would choose between, limits or not: `{why, within_limits, time_ratio, cost_ratio, …choice}`; `why` is
    `chosen`, `cheapest`, `fastest`, `knee` or `one function`, ratios are to the chosen one."""
    alternatives: list[dict[str, Any]] = field(default_factory=list)
    """As `compared`: next best W, one worker more or less, one memory step more or less."""
    uncertainty: dict[str, Any] = field(default_factory=dict)
    """What the profile is not sure of, and what follows for time, cost and choice: `uncertainty.Uncertainty`."""
    extrapolated: list[str] = field(default_factory=list)
    """Sizes and quotas of the choice beyond those that were measured."""
    advice: list[str] = field(default_factory=list)
    """Sentences for people."""
    machines: list[dict[str, Any]] = field(default_factory=list)
    """The same job on virtual machines and containers, at most six: `{name, seconds, cost_usd, kind, arm64, verified, as_of,
    vcpus, counted_vcpus}`, cheapest first; `kind` is `on demand`, `spot` or `fargate`."""
    gpus: list[dict[str, Any]] = field(default_factory=list)
    """Machines with a GPU: `{name, hour_usd, break_even, seconds, cost_usd, verified, as_of}`, as `planning.rented.gpus` says."""
    beyond: dict[str, float] = field(default_factory=dict)
    """`arm64_usd` and `egress_usd`, as `planning.rented.beyond` says."""
    front: list[dict[str, Any]] = field(default_factory=list)
    """Choices that nothing beats in both time and cost, fastest first."""
    profile: dict[str, Any] = field(default_factory=dict)
    """`name` of the workload and of the platform, `source`, `as_of`."""

    def to_dict(self) -> dict[str, Any]:
        """The contract of `ephemeron plan --json`, and `plan.json`."""
        choice = self.choice.to_dict()
        rest = asdict(self)
        del rest["choice"]
        return {**choice, **rest}

    def save(self, path: Path) -> None:
        path.write_text(json.dumps(self.to_dict(), indent=2) + "\n")


def load_plan(path: str | Path) -> Plan:
    """Reads what `save` wrote.

    Raises:
        JobError: absent or not a plan.
    """
    try:
        raw = json.loads(Path(path).read_text())
        return parse_plan(raw)
    except OSError as e:
        raise JobError(f"plan {path} cannot be read: {e.strerror}") from None
    except (ValueError, TypeError, KeyError) as e:
        raise JobError(f"plan {path} is not a plan: {e}") from None


NAMES = (
    "workers", "memory_mb", "aggregators", "batch_size_aggregator", "batch_size_nonaggregator", "pattern", "sync", "channel",
    "compression",
)  # fmt: skip


def parse_choice(raw: Mapping[str, Any]) -> Choice:
    """A choice from a dictionary that holds it, whatever else it holds."""
    return Choice(**{n: raw[n] for n in NAMES}, predicted=Predicted(**raw["predicted"]))


def parse_plan(raw: dict[str, Any]) -> Plan:
    """A plan from the dictionary that `to_dict` made."""
    raw = dict(raw)
    choice = parse_choice(raw)
    for name in (*NAMES, "predicted"):
        del raw[name]
    return Plan(choice=choice, search=SearchReport(**raw.pop("search")), **raw)
