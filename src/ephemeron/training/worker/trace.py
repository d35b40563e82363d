"""Time of a worker by phase, in seconds of the run."""

from __future__ import annotations

import asyncio

from ephemeron.events import PHASES, Phase
from ephemeron.training.worker.faults import FaultInjector

Span = tuple[Phase, float, float]


class PhaseTrace:
    """Spans between two flushes. Reports the end of every operation to the fault injector."""

    def __init__(self, origin: float, faults: FaultInjector) -> None:
        self._origin = origin
        self._faults = faults
        self._spans: list[Span] = []
        self.busy_s = 0.0
        """Seconds between the last two flushes without waits."""
        self.totals: dict[Phase, float] = dict.fromkeys(PHASES, 0.0)
        """Seconds of each phase until the last flush."""

    def record(self, phase: Phase, start: float, end: float) -> None:
        self._spans.append((phase, start - self._origin, end - self._origin))
        self._faults.ended(phase)

    def run_time(self) -> float:
        return asyncio.get_running_loop().time() - self._origin

    def flush(self) -> list[Span]:
        """Spans since the last flush: united by phase; a wait only where no other phase was active."""
        spans, self._spans = exclusive(self._spans), []
        self.busy_s = sum(end - start for phase, start, end in spans if phase != "wait")
        for phase, start, end in spans:
            self.totals[phase] += end - start
        return spans


def exclusive(spans: list[Span]) -> list[Span]:
    """Spans with overlapping ones of a phase united, and `wait` without the times of other phases."""
    by_phase: dict[Phase, list[tuple[float, float]]] = {}
    for phase, start, end in spans:
        by_phase.setdefault(phase, []).append((start, end))
    united = {phase: _unite(parts) for phase, parts in by_phase.items()}
    if "wait" in united:
        busy = _unite([part for phase, parts in united.items() if phase != "wait" for part in parts])
        united["wait"] = _minus(united["wait"], busy)
    out = [(phase, round(a, 6), round(b, 6)) for phase, parts in united.items() for a, b in parts]
    return sorted(out, key=lambda s: (s[1], s[2]))


def _unite(parts: list[tuple[float, float]]) -> list[tuple[float, float]]:
    out: list[tuple[float, float]] = []
    for start, end in sorted(parts):
        if out and start <= out[-1][1]:
            out[-1] = (out[-1][0], max(out[-1][1], end))
        else:
            out.append((start, end))
    return out


def _minus(parts: list[tuple[float, float]], holes: list[tuple[float, float]]) -> list[tuple[float, float]]:
    out = []
    for start, end in parts:
        for a, b in holes:
            if b <= start or a >= end:
                continue
            if a > start:
                out.append((start, a))
            start = max(start, b)
        if start < end:
            out.append((start, end))
    return out
