"""Mixed-integer program of one order of devices: the stage of each node that minimises the bottleneck.

A binary variable says whether a node is on a stage or before it. So the constraint that tensors only go forward is one row for each tensor
and stage boundary, and a relaxed solution rounded at any threshold is still a pipeline.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ephemeron.partition.costs.table import Costs
from ephemeron.partition.placement.milp_model import MilpProgram, Solution
from ephemeron.partition.placement.stages import DeviceOrder


@dataclass(slots=True)
class StagesProgram:
    """Program of one order. G[i][s] = 1: node i is on stage s or before."""

    program: MilpProgram
    upto: list[list[int]]
    """Variables of all stages but the last, by node."""
    scale_s: float
    stages: int

    @classmethod
    def of(cls, costs: Costs, line: DeviceOrder, *, most_s: float) -> StagesProgram:
        program = MilpProgram()
        size, n = len(line.devices), len(costs.nodes)
        scale_s = max(sum(max(f) + max(b) for f, b in zip(costs.forward, costs.backward, strict=True)), 1e-12) / 1000.0
        total = program.variable(0.0, most_s / scale_s * (1 + 1e-9) + 1e-6 if most_s < float("inf") else most_s, cost=1.0)
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
            self._bounded(total, [(upto[i], s, (costs.forward[i][d] + costs.backward[i][d]) / scale_s) for i in range(n)])
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

    def _links(self, costs: Costs, line: DeviceOrder, total: int) -> None:
        """W[t][p][q] = 1: tensor t goes from stage p to q. Each cut carries at least the tensors that later stages read."""
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

    def _memory(self, costs: Costs, line: DeviceOrder) -> None:
        """Memory: state, and each tensor times the micro-batches in flight of its producer's stage; see `DeviceOrder.recompute`."""
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

    def _copies(self, copies: int, u: int, readers: Sequence[int], s: int, line: DeviceOrder, *, again: bool) -> None:
        """Copies of a tensor on stage s. Without recomputation, the micro-batches in flight of its producer's stage, if a node on s touches it.
        With it (`again`), one if u and all readers are on s. Exact for whole variables."""
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
        """Stages at some thresholds; equal for a whole solution."""
        assert solution.values is not None
        for threshold in (0.5, 0.3, 0.7, 0.1, 0.9):
            yield [sum(solution.values[c] < threshold for c in columns) for columns in self.upto]
