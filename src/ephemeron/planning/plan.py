"""A plan: the chosen configuration, what it is predicted to take, why, and what else there is. A value that travels."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
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
        return asdict(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """How the choice was found, and what that proves."""

    method: str
    """`exact`, `two-stage` or `brute-force`."""
    seconds: float
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
    search: Searched
    minimise: str
    """`cost` or `time`."""
    limits: dict[str, float | None]
    """`deadline_s`, `budget_usd`, `max_global_batch`, as asked."""
    binding: str
    """What bounds it: a limit that holds the optimum back, or else the phase that takes longest."""
    alternatives: list[dict[str, Any]] = field(default_factory=list)
    """`{why, …choice}`: next best, one worker more or less, one memory step more or less."""
    advice: list[str] = field(default_factory=list)
    """Sentences for people."""
    machines: list[dict[str, Any]] = field(default_factory=list)
    """The same job on virtual machines: `{name, seconds, cost_usd}`, cheapest first."""
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


def parse_plan(raw: dict[str, Any]) -> Plan:
    """A plan from the dictionary that `to_dict` made."""
    raw = dict(raw)
    names = ("workers", "memory_mb", "aggregators", "batch_size_aggregator", "batch_size_nonaggregator",
             "pattern", "sync", "channel", "compression")  # fmt: skip
    choice = Choice(**{n: raw.pop(n) for n in names}, predicted=Predicted(**raw.pop("predicted")))
    return Plan(choice=choice, search=Searched(**raw.pop("search")), **raw)
