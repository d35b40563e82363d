"""What every function did, by phase: kept as covered seconds, drawn as tiles of any zoom.

The spans of one rank and phase become a union of intervals with their running total, so the seconds of a phase within any column
of a picture are two look-ups, whatever it holds: one span or ten thousand. A tile is `COLUMNS` columns of a width that is a power of
two, as maps have them; a browser keeps tiles as pictures and moves them, so panning needs neither the server nor the spans.

Each lane of a tile has some rows, in which the phases are stacked in proportion to their seconds. Their borders fall between
two rows; an ordered dither along the columns decides which, so that over a stretch each phase has its true share. Where a column is
shorter than a span, all rows have its phase. Lanes of many functions are too low for this, and show a mixture. Memory: 24 bytes a span.
"""

from __future__ import annotations

import contextlib
import math
from array import array
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from ephemeron.events import PHASES, Phase

Floats = npt.NDArray[np.floating[Any]]

COLUMNS = 512
"""Columns of a tile."""
SHOWN_FIRST: tuple[Phase, ...] = ("compute", "aggregate", "upload", "download", "load", "wait")
"""Phases by the right to be shown where they overlap, as in the report."""
NOTHING, ALIVE = 0, 1
"""Values of a cell in which no function is, or one of which no phase is known; 2 on: phases, as in `PHASES`."""
MIXED_ROWS = 8
"""Rows of low lanes, whose colours are mixed to one for each column: so their shares are eighths, without a dither."""
_NUMBER = {phase: i for i, phase in enumerate(PHASES)}
_MOST_WAITING = 1 << 18
"""Spans that are collected before they are sorted into the lanes: 24 bytes each."""
_STACK: tuple[Phase, ...] = PHASES
"""Phases from the top of a lane to its bottom."""
_DITHER = 64


_NAMES = [(f'"{phase}"'.encode(), str(number).encode()) for phase, number in _NUMBER.items()]
"""Phases as JSON, and their numbers."""
_decode_numbers = msgspec.json.Decoder(list[float]).decode
_decode_spans = msgspec.json.Decoder(list[tuple[str, float, float]]).decode


class Coverage:
    """A union of intervals that are added about in the order of time."""

    __slots__ = ("_before", "_ends", "_last", "_starts", "seconds")

    def __init__(self) -> None:
        self._starts, self._ends, self._before = array("d"), array("d"), array("d")
        self._last = -math.inf
        self.seconds = 0.0

    def add(self, starts: Floats, ends: Floats) -> None:
        """Adds intervals, in their order. What lies before the end of an earlier one counts once.

        Args:
            starts: float64[n], in run seconds.
            ends: float64[n]; an interval that ends before it starts is none.
        """
        reached = np.maximum.accumulate(np.concatenate(([self._last], np.where(ends > starts, ends, -math.inf))))
        starts = np.maximum(starts, reached[:-1])
        new = ends > starts
        starts, ends = starts[new], ends[new]
        if not starts.size:
            return
        before = np.cumsum(np.concatenate(([self.seconds], ends - starts)))
        self._starts.frombytes(starts.tobytes())
        self._ends.frombytes(ends.tobytes())
        self._before.frombytes(before[:-1].tobytes())
        self.seconds, self._last = float(before[-1]), float(reached[-1])

    def until(self, times: Floats) -> Floats:
        """Covered seconds before each of some times."""
        if not self._starts:
            return np.zeros(len(times))
        starts, ends, before = (np.frombuffer(x) for x in (self._starts, self._ends, self._before))
        at = np.searchsorted(starts, times, side="right") - 1
        inside = np.minimum(times, ends[at]) - starts[at]
        return np.where(at < 0, 0.0, before[at] + inside)


class PhaseLanes:
    """Phases of all ranks."""

    def __init__(self) -> None:
        self._sorted: dict[int, dict[str, Coverage]] = {}
        self._waiting: list[tuple[npt.NDArray[np.int64], Floats, Floats]] = []
        """Spans that are in no lane yet: numbers of lane and phase, starts, ends."""
        self._count = 0
        """Of these."""

    def add(self, rank: int, spans: Sequence[tuple[str, float, float]]) -> None:
        """Adds spans of a rank: (phase, start, end). Those of unknown phases are ignored."""
        known = [(_NUMBER[phase], start, end) for phase, start, end in spans if phase in _NUMBER]
        self._append([rank], [len(known)], np.array(known, np.float64).reshape(-1, 3))

    def add_json(self, ranks: Sequence[int], spans: Sequence[bytes]) -> None:
        """Adds spans of some ranks, for each of them as JSON: lists of (phase, start, end). What is none is ignored.

        All of them are read as one list of numbers, which takes a third of the time of reading each list of each of them.
        """
        counts = [text.count(b"[") - 1 for text in spans]
        joined = b",".join(text for text, count in zip(spans, counts, strict=True) if count > 0)
        for name, number in _NAMES:
            joined = joined.replace(name, number)
        try:
            flat = np.array(_decode_numbers(b"[" + joined.translate(None, b"[] ") + b"]"), np.float64)
            self._append(ranks, counts, flat.reshape(sum(counts), 3))
        except ValueError:  # an unknown phase, or no spans at all
            for rank, text in zip(ranks, spans, strict=True):
                with contextlib.suppress(msgspec.MsgspecError):
                    self.add(rank, _decode_spans(text))

    def _append(self, ranks: Sequence[int], counts: Sequence[int], spans: Floats) -> None:
        """Adds spans.

        Args:
            ranks: int[n].
            counts: int[n], spans of each of them.
            spans: float64[sum of `counts`, 3], numbers of phases, starts and ends.
        """
        if not spans.size:
            return
        number = spans[:, 0].astype(np.int64)
        place = np.repeat(np.asarray(ranks, np.int64), counts) * len(PHASES) + number
        place[(number < 0) | (number >= len(PHASES))] = -1
        self._waiting.append((place, spans[:, 1], spans[:, 2]))
        self._count += len(spans)
        if self._count >= _MOST_WAITING:
            self._sort()

    @property
    def _lanes(self) -> dict[int, dict[str, Coverage]]:
        """By rank and phase, with all spans."""
        self._sort()
        return self._sorted

    def _sort(self) -> None:
        if not self._waiting:
            return
        places, starts, ends = (np.concatenate(columns) for columns in zip(*self._waiting, strict=True))
        self._waiting, self._count = [], 0
        order = np.argsort(places, kind="stable")
        places, starts, ends = places[order], starts[order], ends[order]
        bounds = [0, *(np.flatnonzero(np.diff(places)) + 1).tolist(), len(places)]
        for begin, stop in pairwise(bounds):
            rank, number = divmod(int(places[begin]), len(PHASES))
            if rank >= 0:
                lane = self._sorted.setdefault(rank, {})
                lane.setdefault(PHASES[number], Coverage()).add(starts[begin:stop], ends[begin:stop])

    @property
    def ranks(self) -> list[int]:
        """Ranks with any span."""
        return sorted(self._lanes)

    def totals(self, rank: int | None = None) -> dict[str, float]:
        """Seconds by phase of one rank or of all. Phases may overlap."""
        lanes = self._lanes.values() if rank is None else [self._lanes.get(rank, {})]
        return {phase: sum(lane[phase].seconds for lane in lanes if phase in lane) for phase in PHASES}

    def tile(
        self, ranks: Sequence[int], alive: dict[int, list[tuple[float, float]]], *, start: float, column_s: float, rows: int
    ) -> npt.NDArray[np.uint8]:
        """A picture of a stretch of time.

        Args:
            ranks: lanes from the top to the bottom.
            alive: by rank, when functions of it ran.
            start: of the first column, in run seconds.
            column_s: width of a column in seconds.
            rows: of each lane.

        Returns:
            Cells, [lanes * rows, COLUMNS].
        """
        edges = start + column_s * np.arange(COLUMNS + 1, dtype=np.float64)
        out = np.empty((len(ranks), rows, COLUMNS), dtype=np.uint8)
        dither = _van_der_corput(COLUMNS)
        levels = (np.arange(rows)[:, None] + (0.5 if rows == MIXED_ROWS else dither[None, :])) / rows
        levels = np.broadcast_to(levels, (rows, COLUMNS))
        for i, rank in enumerate(ranks):
            out[i] = self._cells(rank, alive.get(rank, []), edges, column_s, levels)
        return out.reshape(len(ranks) * rows, COLUMNS)

    def _cells(self, rank: int, alive: list[tuple[float, float]], edges: Floats, column_s: float, levels: Floats) -> npt.NDArray[np.uint8]:
        shown, left = {}, np.ones(COLUMNS)
        lane = self._lanes.get(rank, {})
        for phase in SHOWN_FIRST:
            if phase in lane:
                share = np.diff(lane[phase].until(edges)) / column_s
                shown[phase] = np.minimum(share, left)
                left = left - shown[phase]
        present = Coverage()
        present.add(*np.array(alive, np.float64).reshape(-1, 2).T)
        idle = np.minimum(left, np.maximum(0.0, np.diff(present.until(edges)) / column_s - (1.0 - left)))
        cells = np.zeros(levels.shape, dtype=np.uint8)
        reached = np.zeros(COLUMNS)
        for value, share in [*((2 + _NUMBER[p], shown[p]) for p in _STACK if p in shown), (ALIVE, idle)]:
            above = reached + share
            cells[(levels >= reached) & (levels < above - 1e-9)] = value
            reached = above
        return cells


def rows_of(lanes: int) -> int:
    """Rows of each lane of a tile: pixels of its height, or `MIXED_ROWS` where lanes are too low to stack anything in."""
    return 20 if lanes <= 16 else 12 if lanes <= 48 else MIXED_ROWS


def _van_der_corput(n: int) -> Floats:
    """A sequence in [0, 1) of which every stretch is spread evenly."""
    bits = _DITHER.bit_length() - 1
    one = [int(f"{i:0{bits}b}"[::-1], 2) / _DITHER for i in range(_DITHER)]
    return np.resize(np.asarray(one), n)
