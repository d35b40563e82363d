"""One row for each invocation, put together from the events that mention it.

A run that is still going, or whose client ended before it, has invocations without an end. They are taken to run on
until now, unless a later attempt of the same rank shows that they do not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ephemeron.events import Continued, Ended, Event, Invoked, Started, Traffic


@dataclass(frozen=True, slots=True, kw_only=True)
class InvocationRow:
    """One invocation, from the call to the bill."""

    rank: int
    attempt: int
    invocation: str
    reason: str = "start"
    invoked: float
    """When the platform accepted the call."""
    start: float
    """When the code began to run; `invoked` if it never said so."""
    end: float
    cold: bool | None = None
    """None: it never started."""
    status: str = ""
    """Status as in `Ended`; `running` or `unknown` when no end is recorded."""
    outcome: str = ""
    error: str = ""
    ended: bool = False
    """Whether there is a bill."""
    billed_s: float = 0.0
    gb_seconds: float = 0.0
    memory_mb: int = 0
    peak_memory_mb: float = 0.0
    traffic: Traffic = field(default_factory=Traffic)
    """The largest counts that it reported itself, or that its end brought."""

    @property
    def well(self) -> bool:
        """It did what it was meant to, or still does."""
        return self.status in ("ok", "running")


def invocation_rows(events: Iterable[Event], *, now: float, over: bool, memory_mb: int) -> tuple[InvocationRow, ...]:
    """All invocations, by rank and then in the order of their calls.

    Args:
        events: in the order of time.
        now: last time known in the run.
        over: the run has ended, so nothing can still be running.
        memory_mb: quota to assume where no bill states it.
    """
    rows: dict[tuple[int, int, str], InvocationRow] = {}
    alive: dict[tuple[int, int], float] = {}
    for e in events:
        if isinstance(e, Invoked | Started | Ended):
            key = (e.rank, e.attempt, e.invocation)
            row = rows.get(key) or _new(e, memory_mb)
            rows[key] = _told(row, e)
        rank, attempt = getattr(e, "rank", None), getattr(e, "attempt", None)
        if rank is not None and attempt is not None:
            alive[rank, attempt] = max(e.t, alive.get((rank, attempt), 0.0))
    last = {rank: max(r.attempt for r in rows.values() if r.rank == rank) for rank in {k[0] for k in rows}}
    closed = [
        r if r.ended else _open(r, now=now, alive=alive[r.rank, r.attempt], gone=over or r.attempt < last[r.rank]) for r in rows.values()
    ]
    return tuple(sorted(closed, key=lambda r: (r.rank, r.invoked, r.attempt)))


def as_begun(events: Iterable[Event]) -> list[Event]:
    """Events in which an invocation has one attempt number: the one with which it began, in the first of its generations.

    Args:
        events: in the order of time.
    """
    began: dict[tuple[int, int], int] = {}
    found: list[Event] = []
    for e in events:
        if isinstance(e, Continued):
            began[e.rank, e.attempt] = began.get((e.rank, e.before), e.before)
        rank, attempt = getattr(e, "rank", None), getattr(e, "attempt", None)
        first = None if rank is None or attempt is None else began.get((rank, attempt))
        changed: Any = e
        found.append(e if first is None else dataclasses.replace(changed, attempt=first))
    return found


def _new(e: Invoked | Started | Ended, memory_mb: int) -> InvocationRow:
    return InvocationRow(rank=e.rank, attempt=e.attempt, invocation=e.invocation, invoked=e.t, start=e.t, end=e.t, memory_mb=memory_mb)


def _told(row: InvocationRow, e: Invoked | Started | Ended) -> InvocationRow:
    """The row with what one more event says about it."""
    match e:
        case Invoked():
            return dataclasses.replace(row, invoked=min(e.t, row.invoked), reason=e.reason)
        case Started():
            return dataclasses.replace(row, start=e.t, end=max(e.t, row.end), cold=e.cold)
        case Ended():
            return dataclasses.replace(
                row,
                end=e.t,
                ended=True,
                status=e.status,
                outcome=e.outcome,
                error=e.error,
                billed_s=e.billed_s,
                gb_seconds=e.gb_seconds,
                memory_mb=e.memory_mb or row.memory_mb,
                peak_memory_mb=e.peak_memory_mb,
                traffic=e.traffic,
            )


def _open(row: InvocationRow, *, now: float, alive: float, gone: bool) -> InvocationRow:
    """An invocation without a bill: its cost so far is estimated from its quota."""
    end = max(row.start, alive if gone else now)
    seconds = end - row.start
    return dataclasses.replace(
        row, end=end, status="unknown" if gone else "running", billed_s=seconds, gb_seconds=row.memory_mb / 1024 * seconds
    )


def owner(rows: Sequence[InvocationRow], t: float) -> InvocationRow | None:
    """Which of the invocations with one (rank, attempt) reported at `t`.

    A platform may start a call twice; the one that stepped aside as a duplicate reports nothing.
    """
    able = [r for r in rows if r.outcome != "duplicate"] or rows
    there = [r for r in able if r.start <= t <= r.end]
    return there[-1] if there else able[-1] if able else None
