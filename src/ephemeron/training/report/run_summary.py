"""A run, told once: everything the pictures and tables need, out of its events and the prices.

Pure: events in, values out; no clock, no file, no drawing. The page and the picture both read a `RunSummary`, so
they cannot disagree. Works on any prefix of a run: one that goes on, was stopped, failed before its first
iteration, or has only just been launched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ephemeron.events import (
    Ended,
    Evaluated,
    Event,
    FaultFired,
    Invoked,
    Loaded,
    Measured,
    Note,
    Progress,
    RunEnded,
    RunStarted,
    Started,
    StoreRequests,
)
from ephemeron.runs.region_activity import RegionActivity, region_activities
from ephemeron.training.report.cost_series import CostRates, Spending, spending, with_further
from ephemeron.training.report.invocations import InvocationRow, as_begun, invocation_rows
from ephemeron.training.report.lanes import Lane, lanes
from ephemeron.training.report.metrics import Learning, learning


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """Summary of a run's events."""

    run: RunStarted | None
    """The first launch; None when even that line is missing."""
    status: str
    """finished, stopped or failed; `running` when no end is recorded."""
    causes: tuple[str, ...]
    """Why it failed, one line for each function."""
    seconds: float
    """Last moment known."""
    resumes: tuple[float, ...]
    """When it was taken up again."""
    learning: Learning
    invocations: tuple[InvocationRow, ...]
    """By rank, then in the order of their calls."""
    lanes: tuple[Lane, ...]
    """One for each rank that was ever called."""
    faults: tuple[FaultFired, ...]
    notes: tuple[Note, ...]
    environment: tuple[str, ...]
    """Limits that the platform could not enforce, and other notes of the launch."""
    spending: Spending
    regions: tuple[RegionActivity, ...] = ()
    """Groups of functions as regions; empty: there is one group."""
    learning_of: tuple[tuple[str, Learning], ...] = ()
    """By region, its own curves: regions have different weights between their exchanges, and maybe different iterations."""

    @property
    def merged(self) -> bool:
        """The lanes hold columns of shares, because there were too many spans to draw."""
        return any(lane.columns for lane in self.lanes)

    @property
    def column_s(self) -> float:
        """Width of a merged column in seconds; 0 when nothing was merged."""
        return next((lane.columns[0].end - lane.columns[0].start for lane in self.lanes if lane.columns), 0.0)

    @classmethod
    def from_events(cls, events: Iterable[Event], prices: CostRates) -> RunSummary:
        """Tells the story.

        Args:
            events: in any order; `t` decides, and where it ties, the order given.
            prices: what a GB-second, an invocation and each channel operation cost, in USD.
        """
        told = as_begun(sorted(events, key=lambda e: e.t))
        launches = [e for e in told if isinstance(e, RunStarted)]
        run = launches[0] if launches else None
        final = _final(told)
        work = [e for e in told if isinstance(e, Progress | Loaded)]
        progress = [e for e in work if isinstance(e, Progress)]
        now = max([0.0, *(e.t for e in told), *(end for e in work for _, _, end in e.spans)])
        rows = invocation_rows(told, now=now, over=final is not None, memory_mb=run.memory_mb if run else 0)
        spent, rows = spending(rows, [*progress, *(e for e in told if isinstance(e, StoreRequests))], prices, now=now)
        spent = with_further(spent, told, prices)
        evaluated = [e for e in told if isinstance(e, Evaluated)]
        regions = tuple(region_activities(told))
        ranks = {e.rank for e in told if isinstance(e, Invoked | Started | Progress | Loaded | Ended)}
        return cls(
            run=run,
            status=final.status if final else "running",
            causes=tuple(final.causes) if final else (),
            seconds=now,
            resumes=tuple(e.t for e in launches[1:]),
            learning=learning(progress, evaluated, (e for e in told if isinstance(e, Measured))),
            invocations=rows,
            lanes=lanes(work, ranks, now),
            faults=tuple(e for e in told if isinstance(e, FaultFired)),
            notes=tuple(_first_of_each(e for e in told if isinstance(e, Note))),
            environment=tuple(dict.fromkeys(note for e in launches for note in e.notes)),
            spending=spent,
            regions=regions,
            learning_of=tuple(
                (
                    region.started.name,
                    learning((e for e in progress if region.started.has(e.rank)), (e for e in evaluated if region.started.has(e.rank))),
                )
                for region in regions
            ),
        )


def _final(told: list[Event]) -> RunEnded | None:
    """The end of the run, unless it was resumed after it."""
    last = next((e for e in reversed(told) if isinstance(e, RunEnded | RunStarted)), None)
    return last if isinstance(last, RunEnded) else None


def _first_of_each(notes: Iterable[Note]) -> Iterable[Note]:
    """Without repetitions: every function warns of the same."""
    found: dict[tuple[str, str], Note] = {}
    for note in notes:
        found.setdefault((note.level, note.text), note)
    return found.values()
