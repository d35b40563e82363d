"""Best chain of downsets by dynamic programming over the number of used devices of each class, which covers all orders of devices.

From the last stage to the first, the table has the least bottleneck for each number of used devices of each class, the class of the
stage that was added last, and the downset that remains for earlier stages. A stage is the difference of two downsets. The order is from
the last stage on, because micro-batches in flight are counted from there. Unused devices cost nothing, so fewer stages are covered.

A table over downsets does not contain which of the earlier stages produced a tensor. So there are two readings:

- `least`: a link carries only the tensors that cross it for any stages around it, and memory holds only tensors that the stage
  produces. No pipeline is faster, so if nothing is found below a value, that value is proved.
- `most`: every link carries all tensors that cross the cut, and memory holds them. This is exact if no tensor skips a stage; the true
  bottleneck of the chain found is not greater.

On chains of layers both are equal. The search only follows chains below a known value, and only downsets that the remaining devices
could still complete below it; with a good plan these are few.

Dynamic program of `chains` with the next stage in its state: traffic between neighbouring stages is exact.

The state is a pair of downsets, the stage that was added last. So links between neighbours carry exactly the tensors that one stage
produces and the other reads; only tensors that skip a stage are still free. There are many more states, so this search comes last,
with the best known plan as the limit: few states are below it. If nothing is found, that plan is proved optimal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from ephemeron.partition.costs.table import Costs
from ephemeron.partition.placement.downsets import DeviceClasses, Downsets
from ephemeron.partition.placement.plan import Timer
from ephemeron.partition.placement.stages import in_flight
from ephemeron.partition.schedule_simulator.schedule import Schedule

Reading = Literal["least", "most"]
SLACK = 1e-10
"""Relative tolerance; sums of the same times in another order differ by less."""
MOST_CELLS = 1_500_000_000
"""Limit of compared pairs of downsets."""
MOST_STATE_BYTES = 512 << 20
CHUNK = 1 << 21


@dataclass(frozen=True, slots=True, kw_only=True)
class DownsetChain:
    """Stages as classes of devices and downsets."""

    value_s: float
    """Bottleneck according to the reading."""
    classes: tuple[int, ...]
    """Class of each stage, first stage first."""
    stage: tuple[int, ...]
    """By node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ChainSearchResult:
    """Result of a search below a value."""

    chain: DownsetChain | None
    """Best chain; None: there is none."""
    complete: bool
    """Whether the search was exhaustive; otherwise nothing is proved."""


@dataclass(slots=True)
class _ChainRow:
    """Table row of one number of devices of each class and one class of the first stage so far."""

    value: Any
    """Bottleneck by remaining downset; infinite: no chain."""
    next_downset: Any
    next_class: Any
    alive: Any = field(default=None)
    """Downsets with a finite bottleneck."""


class ChainSearch:
    """Tables of one model on classes of devices."""

    def __init__(self, costs: Costs, schedule: Schedule, downsets: Downsets, classes: DeviceClasses) -> None:
        self.costs, self.downsets, self.classes = costs, downsets, classes
        size = len(costs.devices)
        self._flight = in_flight(schedule, size + 1)[::-1]  # by number of later stages
        self._recompute = schedule.recompute
        units = downsets.units
        heads = [own[0] for own in classes.members]
        both = np.array(costs.forward) + np.array(costs.backward)
        by_unit = np.zeros((len(units.nodes), len(heads)))
        np.add.at(by_unit, list(units.unit), both[:, heads])
        total = by_unit.sum(axis=0)
        self._speed = np.array([1.0 / t if t > 0 else 1.0 for t in total])
        self._work = self._summed(by_unit)
        self._progress = self._summed((by_unit * self._speed).min(axis=1, keepdims=True))[:, 0]
        self._by_progress = np.argsort(self._progress, kind="stable")
        self._sorted_progress = self._progress[self._by_progress]
        self._floor_s = 1.0 / max(1e-300, sum(c * s for c, s in zip(classes.counts, self._speed, strict=True)))
        """Lower bound of the bottleneck; faster links never decide."""
        self._floor_s *= float(self._progress[-1])
        self._capacity = [min(costs.capacity[d] for d in own) for own in classes.members]
        self._largest = [max(costs.capacity[d] for d in own) for own in classes.members]
        self._memory: dict[Reading, tuple[Any, Any, Any]] = {}
        self._links: dict[Reading, Any] = {}

    def below(self, value_s: float, reading: Reading, timer: Timer) -> ChainSearchResult:
        """Best chain below a value.

        Args:
            value_s: upper limit, excluded; infinite: no limit.
            reading: see the module.
            timer: ends earlier.
        """
        counts, full = self.classes.counts, len(self.downsets.masks) - 1
        vectors = math.prod(c + 1 for c in counts)
        if vectors * len(counts) * (full + 1) * 13 > MOST_STATE_BYTES:
            return ChainSearchResult(chain=None, complete=False)
        self.prepare(reading)
        least = self.limit_s(value_s, reading)
        rows: dict[tuple[tuple[int, ...], int], _ChainRow] = {}
        start = self._empty()
        start.value[full], start.alive = 0.0, np.array([full])
        rows[(0,) * len(counts), -1] = start
        best: tuple[float, tuple[int, ...], int] | None = None
        cells = 0
        for used in sorted(itertools.product(*(range(c + 1) for c in counts)), key=lambda v: (sum(v), v)):
            for y in range(-1, len(counts)):
                row = rows.get((used, y))
                if row is None:
                    continue
                alive = np.nonzero(row.value < least)[0] if row.alive is None else row.alive
                if not len(alive):
                    continue
                for x, c in enumerate(counts):
                    if used[x] == c:
                        continue
                    more = tuple(u + (k == x) for k, u in enumerate(used))
                    into = rows.get((more, x))
                    if into is None:
                        into = rows[more, x] = self._empty()
                    cells += self._extended(row, alive, into, x, y, more, least, reading)
                    if into.value[0] < least:
                        least = float(into.value[0]) * (1 - SLACK)
                        best = (float(into.value[0]), more, x)
                    if cells > MOST_CELLS or timer.left_s() <= 0:
                        return ChainSearchResult(chain=self._traced(rows, best), complete=False)
        return ChainSearchResult(chain=self._traced(rows, best), complete=True)

    def _extended(
        self, row: _ChainRow, alive: Any, into: _ChainRow, x: int, y: int, more: tuple[int, ...], least: float, reading: Reading
    ) -> int:
        """Add a stage on class x before one of class y; number of compared pairs."""
        follow = sum(more) - 1
        last = int(np.searchsorted(self._sorted_progress, self._left(more, least), side="right"))
        value = row.value[alive]
        if y >= 0:
            value = np.maximum(value, self._links[reading][x, y, alive])
        fits = value < least
        alive, value = alive[fits], value[fits]
        order = np.argsort(self._progress[alive], kind="stable")
        alive, value = alive[order], value[order]
        work, cells, at = self._work[:, x], 0, 0
        while at < len(alive):
            low = self._progress[alive[at]] - self._speed[x] * least * (1 + SLACK) - SLACK
            first = int(np.searchsorted(self._sorted_progress, low, side="left"))
            count = min(len(alive) - at, max(1, CHUNK // max(1, last - first)))
            upper, below = alive[at : at + count], self._by_progress[first:last]
            highest = self._progress[upper[-1]] + SLACK
            below = below[: int(np.searchsorted(self._progress[below], highest, side="right"))]
            cells += len(upper) * len(below)
            taken = work[upper][:, None] - work[below][None, :]
            a, b = np.nonzero((taken < least) & (taken > -SLACK * least))
            j, k = upper[a], below[b]
            keep = j != k
            a, j, k, taken = a[keep], j[keep], k[keep], taken[a[keep], b[keep]]
            for w in range(self.downsets.packed.shape[1]):
                inside = (self.downsets.packed[k, w] & ~self.downsets.packed[j, w]) == 0
                a, j, k, taken = a[inside], j[inside], k[inside], taken[inside]
            keep = self.fits(j, k, x, follow, reading)
            a, j, k, taken = a[keep], j[keep], k[keep], taken[keep]
            total = np.maximum(value[at : at + count][a], taken)
            keep = (total < least) & (total < into.value[k])
            j, k, total = j[keep], k[keep], total[keep]
            rank = np.argsort(-total, kind="stable")  # of several chains to one downset, the best is written last
            j, k, total = j[rank], k[rank], total[rank]
            into.value[k], into.next_downset[k], into.next_class[k] = total, j, y
            at += count
        return cells

    def limit_s(self, value_s: float, reading: Reading) -> float:
        """Exclusive limit of the search; finite, and above every chain if `value_s` is infinite."""
        if value_s == math.inf:
            return float(self._work[-1].max()) * 2 + float(np.max(self._links[reading], initial=0.0)) + 1.0
        return value_s * (1 - SLACK)

    def candidates(self, j: int, x: int, more: tuple[int, ...], least: float) -> tuple[Any, Any]:
        """Candidates below downset j by their sums, and seconds of computation of the stage in between: it takes less than `least` on class x,
        and the devices that are not among `more` can complete the remaining downset."""
        last = int(np.searchsorted(self._sorted_progress, self._left(more, least), side="right"))
        low = self._progress[j] - self._speed[x] * least * (1 + SLACK) - SLACK
        first = int(np.searchsorted(self._sorted_progress, low, side="left"))
        found = self._by_progress[first:last]
        taken = self._work[j, x] - self._work[found, x]
        keep = (taken < least) & (taken > -SLACK * least)
        return found[keep], taken[keep]

    def stages(self, ends: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """Stage by node; stages are pairs of downsets, first stage first."""
        stage = [0] * len(self.costs.nodes)
        for number, (k, j) in enumerate(ends):
            inside = self.downsets.masks[j] & ~self.downsets.masks[k]
            for u, own in enumerate(self.downsets.units.nodes):
                if inside >> u & 1:
                    for i in own:
                        stage[i] = number
        return tuple(stage)

    def _left(self, more: tuple[int, ...], least: float) -> float:
        """Most progress of the devices that are not among `more`."""
        left = sum((c - m) * s for c, m, s in zip(self.classes.counts, more, self._speed, strict=True)) * least
        return float(left * (1 + SLACK) + SLACK)

    def fits(self, j: Any, k: Any, x: int, follow: int, reading: Reading) -> Any:
        """Whether stages from downsets k to j fit in memory on class x, with `follow` later stages."""
        state, made, crossing = self._memory[reading]
        flight, before = self._flight[follow], self._flight[min(follow + 1, len(self._flight) - 1)]
        if reading == "least":
            times = 1 if self._recompute else flight
            return state[j] - state[k] + times * (made[j] - made[k]) <= self._largest[x]
        return state[j] - state[k] + flight * (made[j] - made[k]) + before * crossing[k] <= self._capacity[x]

    def prepare(self, reading: Reading) -> None:
        """Compute the tables of a reading."""
        if reading in self._links:
            return
        costs, units = self.costs, self.downsets.units
        count, table = len(units.nodes), self.downsets.table
        ignored = units.followers if reading == "least" else frozenset()
        state, made = np.zeros((count, 1)), np.zeros((count, 1))
        for i, u in enumerate(units.unit):
            if i not in ignored:
                state[u] += costs.state[i]
        crossing = np.zeros(len(table))
        kinds = len(self.classes.members)
        there, back = np.zeros((kinds, kinds, len(table))), np.zeros((kinds, kinds, len(table)))
        pairs: dict[tuple[int, int], tuple[Any, Any]] = {}
        for t, i in enumerate(costs.producer):
            u = units.unit[i]
            readers = sorted({units.unit[v] for v in costs.consumers[t]} - {u})
            if i not in ignored:
                made[u] += costs.held[t]
            if not readers:
                continue
            send, gradient = self.between(costs.send[t], reading), self.between(costs.back[t], reading).T
            if not costs.returns[t]:
                gradient = np.zeros_like(gradient)
            if reading == "most":
                crosses = table[:, u] & ~table[:, readers].all(axis=1)
                there += send[:, :, None] * crosses
                back += gradient[:, :, None] * crosses
                crossing += costs.held[t] * crosses
            else:
                for v in readers:
                    a, b = pairs.get((u, v), (0.0, 0.0))
                    pairs[u, v] = a + send, b + gradient
        if reading == "least" and any(max(a.max(), b.max()) > self._floor_s for a, b in pairs.values()):
            self._adjacent(pairs, there, back)
        self._links[reading] = np.maximum(there, back)
        self._memory[reading] = (self._summed(state)[:, 0], self._summed(made)[:, 0], crossing)

    def _adjacent(self, pairs: dict[tuple[int, int], tuple[Any, Any]], there: Any, back: Any) -> None:
        """Least traffic from one stage to the next: the stage before a cut has at least one of the last units before it, the stage after it
        at least one of the first units after it; of all such pairs, the least traffic counts."""
        units, table = self.downsets.units, self.downsets.table
        final = table.copy()
        for u, after in enumerate(units.after):
            if after:
                final[:, u] &= ~table[:, list(after)].any(axis=1)
        ends = final.sum(axis=1)
        for j in range(1, len(table) - 1):
            ready = self.downsets.ready[j]
            if ends[j] * ready.bit_count() > 16:
                continue
            found = [pairs.get((int(u), v)) for u in np.nonzero(final[j])[0] for v in range(ready.bit_length()) if ready >> v & 1]
            if any(f is None for f in found):
                continue
            there[:, :, j] = np.minimum.reduce([f[0] for f in found if f is not None])
            back[:, :, j] = np.minimum.reduce([f[1] for f in found if f is not None])

    def between(self, seconds: Sequence[Sequence[float]], reading: Reading) -> Any:
        """Classes × classes: seconds between any two different devices."""
        choose, members = (min if reading == "least" else max), self.classes.members
        if self.classes.exact:
            ends = [(own[0], own[-1]) for own in members]
            return np.array([[seconds[a][b2] if a != b2 else 0.0 for _, b2 in ends] for a, _ in ends])
        return np.array([[choose((seconds[a][b] for a in p for b in q if a != b), default=0.0) for q in members] for p in members])

    def _summed(self, by_unit: Any) -> Any:
        """Sum over the units of each downset."""
        table = self.downsets.table
        step = max(1, (1 << 22) // max(1, table.shape[1]))
        parts = [table[i : i + step].astype(np.float64) @ by_unit for i in range(0, len(table), step)]
        return np.concatenate(parts)

    def _empty(self) -> _ChainRow:
        size = len(self.downsets.masks)
        return _ChainRow(
            value=np.full(size, math.inf), next_downset=np.zeros(size, dtype=np.int32), next_class=np.full(size, -1, dtype=np.int8)
        )

    def _traced(
        self, rows: dict[tuple[tuple[int, ...], int], _ChainRow], best: tuple[float, tuple[int, ...], int] | None
    ) -> DownsetChain | None:
        if best is None:
            return None
        value, used, x = best
        at, classes, ends = 0, [], []
        while x >= 0:
            row = rows[used, x]
            ends.append((at, int(row.next_downset[at])))
            classes.append(x)
            used = tuple(n - (k == x) for k, n in enumerate(used))
            at, x = int(row.next_downset[at]), int(row.next_class[at])
        return DownsetChain(value_s=value, classes=tuple(classes), stage=self.stages(ends))


# -- dynamic program of `chains` with the next stage in its state -------------------------------------------------


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
