"""Dynamic program of `chains` with the next stage in its state: traffic between neighbouring stages is exact.

The state is a pair of downsets, the stage that was added last. So links between neighbours carry exactly the tensors that one stage
produces and the other reads; only tensors that skip a stage are still free. There are many more states, so this search comes last,
with the best known plan as the limit: few states are below it. If nothing is found, that plan is proved optimal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ephemeron.partition.placement.chains import MOST_CELLS, SLACK, ChainSearch, ChainSearchResult, DownsetChain
from ephemeron.partition.placement.search_budget import Timer

MOST_STATES = 3_000_000
_Row = dict[int, tuple[Any, Any, Any, Any]]
"""By remaining downset: end of the first stage (ascending), bottleneck, end of the next stage, and its class."""


class AdjacentSearch:
    """Search over the tables of a `ChainSearch`."""

    def __init__(self, search: ChainSearch) -> None:
        self.search = search
        self.costs, self.downsets = search.costs, search.downsets
        self._crossing: dict[int, tuple[list[int], Any]] = {}
        units = self.downsets.units
        self._made = [units.unit[i] for i in self.costs.producer]
        self._read = [sorted({units.unit[v] for v in readers} - {self._made[t]}) for t, readers in enumerate(self.costs.consumers)]
        self._send = [search.between(m, "least") for m in self.costs.send]
        self._back = [
            search.between(m, "least").T if self.costs.returns[t] else np.zeros_like(self._send[t]) for t, m in enumerate(self.costs.back)
        ]

    def below(self, value_s: float, timer: Timer) -> ChainSearchResult:
        """Best chain below a value; see `ChainSearch.below`, of which this is a third reading."""
        search, counts = self.search, self.search.classes.counts
        full = len(self.downsets.masks) - 1
        search.prepare("least")
        least, cells, states = search.limit_s(value_s, "least"), 0, 0
        rows: dict[tuple[tuple[int, ...], int], _Row] = {}
        start = (0,) * len(counts)
        rows[start, -1] = {full: (np.array([full]), np.zeros(1), np.array([full]), np.array([-1]))}
        best: tuple[float, tuple[int, ...], int] | None = None
        for used in sorted(itertools.product(*(range(c + 1) for c in counts)), key=lambda v: (sum(v), v)):
            sources = [(y, rows[used, y]) for y in range(-1, len(counts)) if (used, y) in rows]
            for x, c in enumerate(counts):
                if used[x] == c or not sources:
                    continue
                more = tuple(u + (k == x) for k, u in enumerate(used))
                found: dict[int, list[tuple[int, float, int, int]]] = {}
                for j in sorted({j for _, row in sources for j in row}):
                    lower, taken = self._lower(j, x, more, least)
                    if timer.left_s() <= 0:
                        return ChainSearchResult(chain=self._traced(rows, best), complete=False)
                    if not len(lower):
                        continue
                    value = np.full(len(lower), math.inf)
                    end, after = np.zeros(len(lower), dtype=np.int64), np.zeros(len(lower), dtype=np.int64)
                    for y, row in sources:
                        if j not in row:
                            continue
                        ends, known, _, _ = row[j]
                        cells += len(lower) * len(ends)
                        total = np.maximum(known[None, :], self._link(j, lower, ends, x, y)) if y >= 0 else known[None, :]
                        total = np.broadcast_to(total, (len(lower), len(ends)))
                        at = total.argmin(axis=1)
                        own = total[np.arange(len(lower)), at]
                        better = own < value
                        value[better], end[better], after[better] = own[better], ends[at[better]], y
                    value = np.maximum(value, taken)
                    for n in np.nonzero(value < least)[0]:
                        k = int(lower[n])
                        found.setdefault(k, []).append((j, float(value[n]), int(end[n]), int(after[n])))
                        states += 1
                        if k == 0 and value[n] < least:
                            least, best = float(value[n]) * (1 - SLACK), (float(value[n]), more, x)
                    if cells > MOST_CELLS or states > MOST_STATES:
                        return ChainSearchResult(chain=self._traced(rows, best), complete=False)
                if found:
                    rows[more, x] = {k: _columns(own) for k, own in found.items()}
        return ChainSearchResult(chain=self._traced(rows, best), complete=True)

    def _lower(self, j: int, x: int, more: tuple[int, ...], least: float) -> tuple[Any, Any]:
        """Downsets from which a stage of class x may reach to j, and its seconds of computation."""
        candidates, taken = self.search.candidates(j, x, more, least)
        packed = self.downsets.packed
        inside = ((packed[candidates] & ~packed[j]) == 0).all(axis=1) & (candidates != j)
        candidates, taken = candidates[inside], taken[inside]
        fits = self.search.fits(np.full(len(candidates), j), candidates, x, sum(more) - 1, "least")
        return candidates[fits], taken[fits]

    def _link(self, j: int, lower: Any, ends: Any, x: int, y: int) -> Any:
        """Busier direction between the stages (k, j) on class x and (j, i) on class y, for all k and i."""
        tensors, made = self._at(j)
        if not tensors:
            return np.zeros((len(lower), len(ends)))
        table = self.downsets.table
        before = ~table[lower][:, made]
        # readers up to j do not count: a tensor that crosses has others, some of them maybe in the next stage
        outside = [[v for v in self._read[t] if not table[j, v]] for t in tensors]
        behind = np.stack([table[ends][:, own].any(axis=1) for own in outside], axis=1)
        there = np.array([self._send[t][x, y] for t in tensors])
        back = np.array([self._back[t][x, y] for t in tensors])
        left, right = before.astype(np.float64), behind.astype(np.float64).T
        return np.maximum((left * there) @ right, (left * back) @ right)

    def _at(self, j: int) -> tuple[list[int], Any]:
        """Tensors that cross a downset, and their units."""
        if j not in self._crossing:
            inside = self.downsets.table[j]
            tensors = [t for t, u in enumerate(self._made) if inside[u] and self._read[t] and not inside[self._read[t]].all()]
            self._crossing[j] = (tensors, np.array([self._made[t] for t in tensors], dtype=np.int64))
        return self._crossing[j]

    def _traced(
        self, rows: dict[tuple[tuple[int, ...], int], _Row], best: tuple[float, tuple[int, ...], int] | None
    ) -> DownsetChain | None:
        if best is None:
            return None
        value, used, x = best
        if (used, x) not in rows:  # cut off before its row was finished
            return None
        at, classes, ends = 0, [], []
        own_ends, values, _, _ = rows[used, x][0]
        end = int(own_ends[int(values.argmin())])
        while True:
            ends.append((at, end))
            classes.append(x)
            own_ends, _, nexts, after = rows[used, x][at]
            n = int(np.nonzero(own_ends == end)[0][0])
            used = tuple(u - (k == x) for k, u in enumerate(used))
            at, end, x = end, int(nexts[n]), int(after[n])
            if x < 0:
                return DownsetChain(value_s=value, classes=tuple(classes), stage=self.search.stages(ends))


def _columns(rows: Sequence[tuple[int, float, int, int]]) -> tuple[Any, Any, Any, Any]:
    ends, values, nexts, after = (np.array(column) for column in zip(*rows, strict=True))
    return ends, values, nexts, after
