"""The pipeline with the least bottleneck, and a proof of how near it is to the best.

For every order of devices: cuts by dynamic programming, a linear program whose solution is rounded (where the shares of all nodes
up to a stage are cut at one threshold, tensors still only go forward), annealing, and the mixed-integer program itself, whose
optimum is the proof. Orders that a bound excludes are not looked at further; orders that the devices' symmetry makes equal are
looked at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from ephemeron.partition.costs import Costs
from ephemeron.partition.effort import Effort, Timer
from ephemeron.partition.programs import Program, Solution
from ephemeron.partition.schedule import Schedule
from ephemeron.partition.stages import Line, Staged, cuts, in_flight, mended, settled, staged

TIGHT = 1e-3
"""Relative gap at which nothing more is tried."""
MOST_LINES = 400
"""All orders of up to five devices; of more, only some are tried, and the bound is that of loads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pipelined:
    """What was found and proved."""

    found: tuple[Staged, ...]
    """The best that fit, best first; empty: none."""
    bound_s: float
    """No pipeline has a lesser bottleneck."""


def best_pipeline(
    costs: Costs, schedule: Schedule, *, effort: Effort, timer: Timer, least: Sequence[Staged] = ()
) -> Pipelined:
    """Searches all orders of devices.

    Args:
        costs: of one micro-batch.
        schedule: what is kept in flight.
        effort: limits and seed.
        timer: ends earlier.
        least: pipelines that are known.

    Raises:
        MissingExtra: SciPy is not installed.
    """
    rng = Random(effort.seed)
    lines = sorted(_lines(costs, schedule, rng), key=lambda line: _load_bound_s(costs, line))
    bounds = {line: _load_bound_s(costs, line) for line in lines}
    anyhow_s = 0.0 if _all_lines(costs) else _load_bound_s(costs, lines[0], everywhere=True)
    found = [s for s in least if s.over_bytes == 0]
    steps = max(1, effort.annealing_steps // (2 * len(lines)))
    orders = _orders(costs, rng)
    promising: list[tuple[float, Line, Staged]] = []

    def best_s() -> float:
        return min((s.bottleneck_s for s in found), default=float("inf"))

    for k, line in enumerate(lines):
        if bounds[line] >= best_s() * (1 - TIGHT):
            continue
        if timer.left_s() <= 0 and promising:
            break
        tries = [staged(costs, line, cuts(costs, line, order)) for order in orders]
        start = min(tries, key=lambda s: (s.over_bytes, s.bottleneck_s))
        share = timer.part(0.25 / max(1, len(lines) - k)) if k < len(lines) - 1 else timer.part(0.1)
        better = settled(costs, line, start.stage, rng=rng, steps=min(steps, 200 * len(costs.nodes)), timer=share)
        promising.append((better.bottleneck_s, line, better))
        if better.over_bytes == 0:
            found.append(better)
    for relaxed in (True, False):
        promising.sort(key=lambda p: (p[2].over_bytes > 0, p[0]))
        for k, (_, line, start) in enumerate(promising):
            if bounds[line] >= best_s() * (1 - TIGHT) or timer.left_s() <= 0:
                continue
            program = _StagesProgram.of(costs, line, most_s=best_s())
            solution = program.program.solve(
                time_limit_s=timer.part(1.0 / (len(promising) - k)).left_s()
                if not relaxed
                else timer.part(0.5).left_s(),
                node_limit=effort.program_nodes,
                gap=TIGHT / 4,
                relaxed=relaxed,
            )
            bounds[line] = max(bounds[line], min(best_s(), solution.bound * program.scale_s * (1 - 1e-7)))
            if solution.values is None:
                continue
            for stage in program.rounded(solution):
                better = staged(costs, line, mended(costs, stage))
                if (better.over_bytes, better.bottleneck_s) < (start.over_bytes, start.bottleneck_s):
                    start = better
            better = settled(
                costs, line, start.stage, rng=rng, steps=min(steps, 100 * len(costs.nodes)), timer=timer.part(0.2)
            )
            if better.over_bytes == 0:
                found.append(better)
    proved = min(bounds.values()) if _all_lines(costs) else anyhow_s
    found.sort(key=lambda s: s.bottleneck_s)
    return Pipelined(found=tuple(found[:3]), bound_s=min(proved, best_s()))


def staging(costs: Costs, schedule: Schedule, where: Sequence[int]) -> Staged | None:
    """A placement as stages; None if tensors go to and fro."""
    used = list(dict.fromkeys(where))
    feeds = {
        (where[u], where[v]) for t, u in enumerate(costs.producer) for v in costs.consumers[t] if where[u] != where[v]
    }
    order: list[int] = []
    while len(order) < len(used):
        ready = [d for d in used if d not in order and all(a in order for a, b in feeds if b == d)]
        if not ready:
            return None
        order.append(ready[0])
    line = Line(devices=tuple(order), flight=tuple(in_flight(schedule, len(order))), recompute=schedule.recompute)
    return staged(costs, line, [order.index(d) for d in where])


def _all_lines(costs: Costs) -> bool:
    """Whether every order of every set of devices can be looked at."""
    size = len(costs.devices)
    return sum(math.perm(size, count) for count in range(1, size + 1)) <= MOST_LINES


def _lines(costs: Costs, schedule: Schedule, rng: Random) -> Iterator[Line]:
    """Every order of every set of devices, but of equal ones only the first. Of many devices only some orders of all: from each
    along the fastest links, and at random."""
    size = len(costs.devices)
    if not _all_lines(costs):
        flight = tuple(in_flight(schedule, size))
        for first in range(size):
            yield Line(devices=_along_fast_links(costs, first), flight=flight, recompute=schedule.recompute)
        for _ in range(MOST_LINES // 10):
            yield Line(devices=tuple(rng.sample(range(size), size)), flight=flight, recompute=schedule.recompute)
        return
    seen = set()
    for count in range(size, 0, -1):
        flight = tuple(in_flight(schedule, count))
        for order in itertools.permutations(range(size), count):
            like = (
                tuple(costs.capacity[d] for d in order),
                tuple(tuple(row[d] for d in order) for row in costs.forward),
                tuple(tuple(row[d] for d in order) for row in costs.backward),
                tuple(tuple(m[p][q] for p in order for q in order) for m in costs.send),
                tuple(tuple(m[p][q] for p in order for q in order) for m in costs.back),
            )
            if hash(like) not in seen:
                seen.add(hash(like))
                yield Line(devices=order, flight=flight, recompute=schedule.recompute)


def _along_fast_links(costs: Costs, first: int) -> tuple[int, ...]:
    order, left = [first], set(range(len(costs.devices))) - {first}
    while left:
        at = order[-1]
        order.append(min(left, key=lambda d: (sum(m[at][d] for m in costs.send), d)))
        left.remove(order[-1])
    return tuple(order)


def _load_bound_s(costs: Costs, line: Line, *, everywhere: bool = False) -> float:
    """If work could be divided at will: each node gets as much as where it takes least of all devices' time.

    With unrelated times, weights w on devices with Σ w = 1 give the bound Σ_i min_d w_d t_id for any w (duality); w in proportion
    to total speed is exact where devices differ by a factor only.
    """
    devices = range(len(costs.devices)) if everywhere else line.devices
    totals = [sum(f[d] + b[d] for f, b in zip(costs.forward, costs.backward, strict=True)) for d in devices]
    if not all(totals):
        return 0.0
    weights = [1.0 / t for t in totals]
    share = [w / sum(weights) for w in weights]
    even = sum(
        min(s * (f[d] + b[d]) for s, d in zip(share, devices, strict=True))
        for f, b in zip(costs.forward, costs.backward, strict=True)
    )
    single = max(min(f[d] + b[d] for d in devices) for f, b in zip(costs.forward, costs.backward, strict=True))
    return max(even, single) * (1 - 1e-12)


def _orders(costs: Costs, rng: Random) -> list[list[int]]:
    """Lists of nodes to cut: as numbered, depth first, and some at random."""
    n = len(costs.nodes)
    found = [list(range(n))]
    for kind in ("deep", "random", "random"):
        waits = [len({costs.producer[t] for t in costs.inputs[i]}) for i in range(n)]
        free = [i for i in range(n) if waits[i] == 0]
        order: list[int] = []
        while free:
            i = free.pop() if kind == "deep" else free.pop(rng.randrange(len(free)))
            order.append(i)
            for v in dict.fromkeys(v for t in costs.outputs[i] for v in costs.consumers[t]):
                waits[v] -= 1
                if waits[v] == 0:
                    free.append(v)
        found.append(order)
    return found


@dataclass(slots=True)
class _StagesProgram:
    """The mixed-integer program of one line. G[i][s] = 1: node i lies on stage s or before."""

    program: Program
    upto: list[list[int]]
    """By node: variables for all stages but the last."""
    scale_s: float
    stages: int

    @classmethod
    def of(cls, costs: Costs, line: Line, *, most_s: float) -> _StagesProgram:
        program = Program()
        size, n = len(line.devices), len(costs.nodes)
        scale_s = max(sum(max(f) + max(b) for f, b in zip(costs.forward, costs.backward, strict=True)), 1e-12) / 1000.0
        total = program.variable(
            0.0, most_s / scale_s * (1 + 1e-9) + 1e-6 if most_s < float("inf") else most_s, cost=1.0
        )
        upto: list[list[int]] = [[] for _ in range(n)]
        for cluster in costs.clusters:
            columns = [program.variable(0.0, 1.0, whole=True) for _ in range(size - 1)]
            for s in range(size - 2):
                program.row({columns[s]: -1.0, columns[s + 1]: 1.0}, least=0.0)
            for i in cluster:
                upto[i] = columns
        self = cls(program=program, upto=upto, scale_s=scale_s, stages=size)
        for t, u in enumerate(costs.producer):
            for v in costs.consumers[t]:
                if upto[u] is not upto[v]:
                    for s in range(size - 1):
                        program.row({upto[u][s]: 1.0, upto[v][s]: -1.0}, least=0.0)
        for s, d in enumerate(line.devices):
            self._bounded(
                total, [(upto[i], s, (costs.forward[i][d] + costs.backward[i][d]) / scale_s) for i in range(n)]
            )
        self._links(costs, line, total)
        self._memory(costs, line)
        return self

    def _on(self, columns: list[int], s: int, factor: float) -> tuple[dict[int, float], float]:
        """factor · [on stage s], as terms and a constant."""
        terms: dict[int, float] = {}
        if s < self.stages - 1:
            terms[columns[s]] = factor
        if s > 0:
            terms[columns[s - 1]] = terms.get(columns[s - 1], 0.0) - factor
        return terms, factor if s == self.stages - 1 else 0.0

    def _bounded(self, total: int, parts: list[tuple[list[int], int, float]]) -> None:
        row: dict[int, float] = {}
        fixed = 0.0
        for columns, s, factor in parts:
            terms, constant = self._on(columns, s, factor)
            fixed += constant
            for c, f in terms.items():
                row[c] = row.get(c, 0.0) - f
        self.program.row({total: 1.0, **row}, least=fixed)

    def _links(self, costs: Costs, line: Line, total: int) -> None:
        """W[t][p][q] = 1: tensor t goes from stage p to q. Over each cut of the line, at least what its readers demand."""
        size, program, scale = self.stages, self.program, self.scale_s
        there: dict[tuple[int, int], dict[int, float]] = {}
        for t, u in enumerate(costs.producer):
            readers = [v for v in costs.consumers[t] if self.upto[v] is not self.upto[u]]
            if not readers:
                continue
            crossing: list[dict[int, float]] = [{} for _ in range(size - 1)]
            for p in range(size):
                for q in range(p + 1, size):
                    w = program.variable(0.0, 1.0)
                    a, b = line.devices[p], line.devices[q]
                    there.setdefault((p, q), {})[w] = costs.send[t][a][b] / scale
                    there.setdefault((q, p), {})[w] = costs.back[t][b][a] / scale if costs.returns[t] else 0.0
                    for s in range(p, q):
                        crossing[s][w] = 1.0
                    if size > 2:
                        for v in readers:
                            terms, constant = self._on(self.upto[u], p, -1.0)
                            more, further = self._on(self.upto[v], q, -1.0)
                            row = {w: 1.0}
                            for c, f in (*terms.items(), *more.items()):
                                row[c] = row.get(c, 0.0) + f
                            program.row(row, least=-1.0 - constant - further)
            for s in range(size - 1):
                for v in readers:
                    program.row({**crossing[s], self.upto[u][s]: -1.0, self.upto[v][s]: 1.0}, least=0.0)
        for terms in there.values():
            program.row({total: 1.0, **{w: -f for w, f in terms.items() if f}}, least=0.0)

    def _memory(self, costs: Costs, line: Line) -> None:
        """State, and each tensor as often as its producer's stage keeps micro-batches in flight; see `Line.recompute`."""
        program, most = self.program, max(line.flight)
        everything = sum(costs.state) + most * sum(costs.held)
        if everything <= min(costs.capacity[d] for d in line.devices):
            return
        scale = 100.0 / max(everything, 1)
        for s, d in enumerate(line.devices):
            row: dict[int, float] = {}
            fixed = 0.0

            def add(columns: list[int], at: int, factor: float, row: dict[int, float] = row) -> float:
                terms, constant = self._on(columns, at, factor)
                for c, f in terms.items():
                    row[c] = row.get(c, 0.0) + f
                return constant

            for i in range(len(costs.nodes)):
                fixed += add(self.upto[i], s, scale * costs.state[i])
            for t, u in enumerate(costs.producer):
                if not costs.held[t]:
                    continue
                again = line.recompute and bool(costs.inputs[u])
                if all(self.upto[v] is self.upto[u] for v in costs.consumers[t]):
                    fixed += add(self.upto[u], s, scale * costs.held[t] * (1 if again else line.flight[s]))
                    continue
                copies = program.variable(0.0, float(most))
                row[copies] = row.get(copies, 0.0) + scale * costs.held[t]
                self._copies(copies, u, costs.consumers[t], s, line, again=again)
            program.row(row, most=scale * costs.capacity[d] - fixed)

    def _copies(self, copies: int, u: int, readers: Sequence[int], s: int, line: Line, *, again: bool) -> None:
        """How often stage s holds a tensor. Without recomputing, as often as its producer u's stage keeps micro-batches in flight, if
        anybody touches it there. With it (`again`), once where u and all readers are on s. Exact where variables are whole."""
        flight, most = line.flight, float(max(line.flight))
        for j in {u, *readers}:
            self._at_least(copies, [(j, s, 1.0 if again else float(flight[s]))])
            if again and j == u:
                continue
            of_producer = [(u, p, 1.0 if again and p == s else float(flight[p])) for p in range(self.stages)]
            self._at_least(copies, [*of_producer, (j, s, most)], below=most)
        for v in readers if again else ():
            self._at_least(copies, [(u, s, float(flight[s])), (v, s, -float(flight[s]))])

    def _at_least(self, column: int, parts: Sequence[tuple[int, int, float]], *, below: float = 0.0) -> None:
        """column ≥ Σ factor · [node on stage] − below."""
        row, spare = {column: 1.0}, 0.0
        for j, s, factor in parts:
            terms, constant = self._on(self.upto[j], s, -factor)
            spare += constant
            for c, f in terms.items():
                row[c] = row.get(c, 0.0) + f
        self.program.row(row, least=-below - spare)

    def rounded(self, solution: Solution) -> Iterator[list[int]]:
        """Stages at some thresholds; of a whole solution they are all the same."""
        assert solution.values is not None
        for threshold in (0.5, 0.3, 0.7, 0.1, 0.9):
            yield [sum(solution.values[c] < threshold for c in columns) for columns in self.upto]


def feasible_pipeline(costs: Costs, schedule: Schedule, *, rng: Random, timer: Timer) -> Staged | None:
    """Some pipeline that fits, found quickly; None: none was found, which proves nothing."""
    for line in _lines(costs, schedule, rng):
        for order in _orders(costs, rng)[:2]:
            for start in (cuts(costs, line, order), _filled(costs, line, order)):
                found = settled(costs, line, start, rng=rng, steps=20 * len(costs.nodes), timer=timer)
                if found.over_bytes == 0:
                    return found
        if timer.left_s() <= 0:
            break
    return None


def _filled(costs: Costs, line: Line, order: Sequence[int]) -> list[int]:
    """Nodes fill stage after stage with memory, in order."""
    stage = [0] * len(costs.nodes)
    s, used = 0, 0
    there: set[int] = set()
    for i in order:
        fresh = {*costs.inputs[i], *costs.outputs[i]} - there
        need = costs.state[i] + _needed(costs, line, s, fresh)
        if s < len(line.devices) - 1 and used + need > costs.capacity[line.devices[s]]:
            s, used, there = s + 1, 0, set()
            need = costs.state[i] + _needed(costs, line, s - 1, {*costs.inputs[i], *costs.outputs[i]})
        used += need
        there |= {*costs.inputs[i], *costs.outputs[i]}
        stage[i] = s
    return mended(costs, stage)


def _needed(costs: Costs, line: Line, s: int, tensors: set[int]) -> int:
    """Bytes of tensors that a stage takes; recomputing, as if all stayed inside, which raising the others' stages mends."""
    if not line.recompute:
        return line.flight[s] * sum(costs.held[t] for t in tensors)
    return sum(costs.held[t] * (1 if costs.inputs[costs.producer[t]] else line.flight[s]) for t in tensors)
