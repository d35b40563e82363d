"""What a run will take, before anything of it is started or paid for: one `Prediction` for all kinds, which `--dry-run` shows.

Each product has a model of its own; a `Predictor` gives its answer in these words. What only one kind knows is in `details`, and as
lines for readers in `rows`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, Protocol, TypeAlias

from ephemeron.config.typed import plain
from ephemeron.prices import Prices
from ephemeron.units import duration

Range: TypeAlias = "tuple[float, float]"
_NOT_PRINTED = ("rows", "details")


@dataclass(frozen=True, slots=True, kw_only=True)
class Basis:
    """A thing that a prediction rests on."""

    source: Literal["measured", "profile", "model", "assumed", "prices"]
    """`measured`: just now, on this machine; `profile`: earlier; `model`: follows from what is asked; `assumed`: a usual value."""
    what: str
    as_of: str = ""
    """ISO date of the measurement or the price list; empty: it has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What a run will take."""

    kind: str
    """See `runs.kinds`."""
    name: str
    """Of the job, the study, the recipe or the function."""
    platform: str
    seconds: float | None = None
    """From the start to the end; None, as `cost_usd`: it cannot be predicted, and a note says why."""
    seconds_range: Range | None = None
    """Of which it is known to be uncertain; None: how uncertain it is is not known."""
    cost_usd: float | None = None
    """At list prices; for functions of this machine, what they would cost on a cloud."""
    cost_usd_range: Range | None = None
    memory_mb: float | None = None
    """That a function needs, MiB; None: not known."""
    quota_mb: int = 0
    """Memory that a function has, MiB; 0: the deployed function's own."""
    functions: int = 0
    """At once."""
    invocations: int | None = None
    """More than functions where work takes longer than the time limit of one; None: not known."""
    rests_on: tuple[Basis, ...] = ()
    notes: tuple[str, ...] = ()
    details: Mapping[str, Any] = field(default_factory=dict)
    """What only this kind knows, as JSON has it."""
    rows: tuple[tuple[str, str], ...] = ()
    """The same as lines for readers: a name, and a text."""

    def document(self) -> dict[str, Any]:
        """As JSON: the keys of all kinds, and beside them those of `details`."""
        common = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in _NOT_PRINTED}
        return {**self.details, **plain(common)}

    def within(self, *, budget_usd: float | None = None, deadline_s: float | None = None) -> Prediction:
        """With notes on limits that it exceeds."""
        notes = list(self.notes)
        if budget_usd is not None and self.cost_usd is not None and self.cost_usd > budget_usd:
            notes.append(f"more than the budget of ${budget_usd:g}, at which the run is stopped")
        if deadline_s is not None and self.seconds is not None and self.seconds > deadline_s:
            notes.append(f"longer than the deadline of {duration(deadline_s)}")
        if self.memory_mb is not None and 0 < self.quota_mb < self.memory_mb:
            notes.append("a function may need more memory than it has: use a larger --memory-mb")
        return replace(self, notes=tuple(notes))


class Predictor(Protocol):
    """Says what a run will take."""

    def __call__(self) -> Prediction:
        """Checks the run as its start would, and predicts it. Nothing is started on a platform, stored or paid for.

        Raises:
            UserError: what the start would refuse.
        """
        ...


def measured_now(what: str) -> Basis:
    """A measurement of this command."""
    return Basis(source="measured", what=what, as_of=time.strftime("%Y-%m-%d"))


def price_basis(prices: Prices) -> Basis:
    """A price list."""
    return Basis(source="prices", what=f"list prices {prices.name}", as_of=prices.as_of)


def invocations_for(functions: int, seconds: float, lifetime_s: float) -> int:
    """Invocations of so many functions at once, each of which is called again at its time limit; 0: there is none."""
    return functions * (max(1, math.ceil(seconds / lifetime_s)) if lifetime_s else 1)
