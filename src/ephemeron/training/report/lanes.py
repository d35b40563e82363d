"""When each function lived and what it did with its time.

Transfers overlap computation and each other. A lane of the timeline can show one thing at a time, so the
phase nearest to progress wins there (`SHOWN_FIRST`); the totals count every phase in full, so they may add up
to more than the lifetime. 10,000 iterations on 8 ranks are some 400,000 spans; beyond `MAX_RECTS` a lane is cut
into equal columns that state the exact share of each phase: less detail, the same proportions.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise

from ephemeron.events import PHASES, Loaded, Phase, Progress

MAX_RECTS = 6000
"""Rectangles in one timeline; a browser stays fluent up to about here."""

STACKED_LANES = 32
"""With more ranks the lanes are too low to stack shares in; they show `cells` instead."""

SHOWN_FIRST: tuple[Phase, ...] = ("compute", "aggregate", "upload", "download", "load", "wait")
"""Which phase a lane shows where several overlap."""

_PRIORITY: dict[str, int] = {phase: i for i, phase in enumerate(SHOWN_FIRST)}

Span = tuple[Phase, float, float, int]
"""(phase, start, end, iteration)."""


@dataclass(frozen=True, slots=True)
class Segment:
    """A stretch of one lane with one phase."""

    phase: Phase
    start: float
    end: float
    iteration: int


@dataclass(frozen=True, slots=True)
class Column:
    """A stretch of one lane with several phases, as seconds of each."""

    start: float
    end: float
    seconds: Mapping[Phase, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One rank over the whole run. Holds segments, or columns when there were too many."""

    rank: int
    segments: tuple[Segment, ...] = ()
    columns: tuple[Column, ...] = ()
    totals: Mapping[Phase, float] = field(default_factory=dict)
    """Seconds of each phase, over all invocations of the rank; phases may overlap."""


def lanes(reports: Iterable[Progress | Loaded], ranks: Iterable[int], end: float) -> tuple[Lane, ...]:
    """One lane for each rank, merged into columns if all together have too many segments."""
    spans = _collect(reports)
    flat = {rank: _flatten([s for (r, _), part in spans.items() if r == rank for s in part]) for rank in sorted(ranks)}
    totals = {rank: _totals(spans, rank) for rank in flat}
    if sum(map(len, flat.values())) <= MAX_RECTS:
        return tuple(Lane(rank=r, segments=tuple(f), totals=totals[r]) for r, f in flat.items())
    seen = {s.phase for segments in flat.values() for s in segments}
    stacked = len(flat) <= STACKED_LANES
    columns = max(8, MAX_RECTS // (len(flat) * len(seen))) if stacked else max(40, 2 * MAX_RECTS // len(flat))
    return tuple(Lane(rank=r, columns=_columns(f, end, columns), totals=totals[r]) for r, f in flat.items())


def _collect(reports: Iterable[Progress | Loaded]) -> dict[tuple[int, int], list[Span]]:
    """Spans by (rank, attempt)."""
    out: dict[tuple[int, int], list[Span]] = {}
    for report in reports:
        mine = out.setdefault((report.rank, report.attempt), [])
        mine.extend((p, a, b, report.iteration) for p, a, b in report.spans if b > a and p in _PRIORITY)
    return out


def _flatten(spans: list[Span]) -> list[Segment]:
    """Spans that the lane shows; no two phases overlap."""
    waiting = sorted(spans, key=lambda s: s[1])
    cuts = sorted({t for s in spans for t in s[1:3]})
    active: list[tuple[int, float, float, Phase, int]] = []
    out: list[Segment] = []
    i = 0
    for start, end in pairwise(cuts):
        while i < len(waiting) and waiting[i][1] <= start:
            phase, a, b, iteration = waiting[i]
            heapq.heappush(active, (_PRIORITY[phase], a, b, phase, iteration))
            i += 1
        while active and active[0][2] <= start:
            heapq.heappop(active)
        if active:
            _extend(out, Segment(active[0][3], start, end, active[0][4]))
    return out


def _extend(out: list[Segment], new: Segment) -> None:
    """Appends, or prolongs the last segment when the new one goes on with it."""
    last = out[-1] if out else None
    if last and last.end == new.start and (last.phase, last.iteration) == (new.phase, new.iteration):
        out[-1] = Segment(new.phase, last.start, new.end, new.iteration)
    else:
        out.append(new)


def _columns(segments: list[Segment], end: float, n: int) -> tuple[Column, ...]:
    width = end / n
    bins: list[dict[Phase, float]] = [{} for _ in range(n)]
    for s in segments:
        for k in range(min(n - 1, int(s.start / width)), min(n - 1, int(s.end / width)) + 1):
            inside = min(s.end, (k + 1) * width) - max(s.start, k * width)
            if inside > 0:
                bins[k][s.phase] = bins[k].get(s.phase, 0.0) + inside
    return tuple(Column(k * width, (k + 1) * width, seconds) for k, seconds in enumerate(bins) if seconds)


def cells(columns: Iterable[Column]) -> tuple[Segment, ...]:
    """Columns as one phase each, for lanes too low to stack anything in.

    Taking the largest phase of each column would let the small ones vanish. Each column goes to the phase that is
    owed most instead (error diffusion), so along the lane every phase keeps its share to within one column.
    """
    owed: dict[Phase | None, float] = {}
    out: list[Segment] = []
    for c in columns:
        width = c.end - c.start
        for phase, seconds in c.seconds.items():
            owed[phase] = owed.get(phase, 0.0) + seconds / width
        owed[None] = owed.get(None, 0.0) + 1.0 - sum(c.seconds.values()) / width
        here = max((None, *c.seconds), key=lambda p: owed.get(p, 0.0))
        owed[here] -= 1.0
        if here is not None:
            _extend(out, Segment(here, c.start, c.end, -1))
    return tuple(out)


def _totals(spans: dict[tuple[int, int], list[Span]], rank: int) -> dict[Phase, float]:
    parts = [part for (r, _), part in spans.items() if r == rank]
    return {phase: sum(_open_seconds(part, phase) for part in parts) for phase in PHASES}


def _open_seconds(spans: list[Span], phase: Phase) -> float:
    """Seconds in which at least one span of the phase was open."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted((a, b) for p, a, b, _ in spans if p == phase):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total
