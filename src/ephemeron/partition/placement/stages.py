"""Placements that form a pipeline, in which tensors only go from earlier stages to later ones: loads, memory and local search.

In a full pipeline each device and each link works on another micro-batch, so the time between two micro-batches is that of the busiest
resource, the *bottleneck*. It depends on the placement only and not on an order of tasks, so its optimum can be proved for larger
graphs than that of one iteration.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np

from ephemeron.partition.costs.table import Costs
from ephemeron.partition.placement.plan import Timer
from ephemeron.partition.schedule_simulator.schedule import Schedule


def in_flight(schedule: Schedule, stages: int) -> list[int]:
    """Micro-batches in flight by stage, see `Schedule`."""
    if schedule.kind != "1f1b":
        return [schedule.micro_batches] * stages
    full = [2 * (stages - s) - 1 if schedule.overlap else stages - s for s in range(stages)]
    return [min(k, schedule.micro_batches) for k in full]


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceOrder:
    """Devices in the order of the pipeline."""

    devices: tuple[int, ...]
    flight: tuple[int, ...]
    """Micro-batches in flight, by stage."""
    recompute: bool = False
    """Whether tensors inside a stage are held for one micro-batch instead of all in flight; inputs of the model are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagedPlacement:
    """Nodes on stages, with bottleneck and memory."""

    line: DeviceOrder
    stage: tuple[int, ...]
    """By node."""
    bottleneck_s: float
    over_bytes: int

    @property
    def where(self) -> list[int]:
        """Device by node."""
        return [self.line.devices[s] for s in self.stage]

    def device_names(self, costs: Costs) -> tuple[str, ...]:
        """Names of the devices that have nodes, in the order of the pipeline."""
        used = set(self.stage)
        return tuple(costs.devices[d] for s, d in enumerate(self.line.devices) if s in used)


class Loads:
    """Loads of stages and links, and memory, updated as clusters move."""

    def __init__(self, costs: Costs, line: DeviceOrder, stage: Sequence[int]) -> None:
        self.costs = costs
        self.line = line
        size = len(line.devices)
        self.stage = list(stage)
        self.busy = [0.0] * size
        self.link = [[0.0] * size for _ in range(size)]
        self.held = [0] * size
        self.readers = [[0] * size for _ in costs.tensors]
        for i, s in enumerate(stage):
            self._node(i, s, 1)
            for t in costs.inputs[i]:
                self.readers[t][s] += 1
        for t in range(len(costs.tensors)):
            self._tensor(t, 1)

    def _node(self, i: int, s: int, sign: int) -> None:
        d = self.line.devices[s]
        self.busy[s] += sign * (self.costs.forward[i][d] + self.costs.backward[i][d])
        self.held[s] += sign * self.costs.state[i]

    def _tensor(self, t: int, sign: int) -> None:
        costs, devices = self.costs, self.line.devices
        p = self.stage[costs.producer[t]]
        nbytes = sign * self.line.flight[p] * costs.held[t]
        if self.line.recompute and costs.inputs[costs.producer[t]] and self.readers[t][p] == len(costs.consumers[t]):
            nbytes = sign * costs.held[t]
        self.held[p] += nbytes
        for q, count in enumerate(self.readers[t]):
            if count and q != p:
                self.link[p][q] += sign * costs.send[t][devices[p]][devices[q]]
                if costs.returns[t]:
                    self.link[q][p] += sign * costs.back[t][devices[q]][devices[p]]
                self.held[q] += nbytes

    def move(self, cluster: Sequence[int], s: int) -> None:
        costs = self.costs
        around = sorted({t for i in cluster for t in (*costs.inputs[i], *costs.outputs[i])})
        for t in around:
            self._tensor(t, -1)
        for i in cluster:
            home = self.stage[i]
            self._node(i, home, -1)
            self._node(i, s, 1)
            for t in costs.inputs[i]:
                self.readers[t][home] -= 1
                self.readers[t][s] += 1
            self.stage[i] = s
        for t in around:
            self._tensor(t, 1)

    def bottleneck_s(self) -> float:
        return max(max(self.busy), max(map(max, self.link)))

    def over_bytes(self) -> int:
        caps = self.costs.capacity
        return sum(max(0, h - caps[d]) for h, d in zip(self.held, self.line.devices, strict=True))

    def may_go(self, cluster: Sequence[int], s: int) -> bool:
        """Whether tensors would still only go forward."""
        costs, stage = self.costs, self.stage
        inside = set(cluster)
        for i in cluster:
            for t in costs.inputs[i]:
                u = costs.producer[t]
                if stage[u] > s and u not in inside:
                    return False
            for t in costs.outputs[i]:
                for v in costs.consumers[t]:
                    if stage[v] < s and v not in inside:
                        return False
        return True


def staged(costs: Costs, line: DeviceOrder, stage: Sequence[int]) -> StagedPlacement:
    """Stages with their bottleneck and memory."""
    loads = Loads(costs, line, stage)
    return StagedPlacement(line=line, stage=tuple(stage), bottleneck_s=loads.bottleneck_s(), over_bytes=loads.over_bytes())


def cuts(costs: Costs, line: DeviceOrder, order: Sequence[int]) -> list[int]:
    """Best stages that are segments of a list of nodes, by dynamic programming; exact on chains.

    A tensor that skips a stage counts on each link in between, and memory is ignored.

    Args:
        costs: the model.
        line: the stages.
        order: nodes, each after its inputs.

    Returns:
        Stage by node.
    """
    n, size = len(order), len(line.devices)
    place = {i: k for k, i in enumerate(order)}
    until = np.zeros((size, n + 1))
    for s, d in enumerate(line.devices):
        until[s, 1:] = np.cumsum([costs.forward[i][d] + costs.backward[i][d] for i in order])
    there, back = np.zeros((size, n + 1)), np.zeros((size, n + 1))
    for t, u in enumerate(costs.producer):
        last = max((place[v] for v in costs.consumers[t]), default=-1)
        low, high = place[u] + 1, last + 1
        for s in range(1, size):
            p, q = line.devices[s - 1], line.devices[s]
            there[s, low:high] += costs.send[t][p][q]
            back[s, low:high] += costs.back[t][q][p] if costs.returns[t] else 0.0
    passed = np.maximum(there, back)
    passed[:, [0, n]] = 0.0  # an empty first or last segment sends nothing
    best: Any = until[0].copy()
    choice = np.zeros((size, n + 1), dtype=int)
    for s in range(1, size):
        value = np.empty(n + 1)
        reach = np.maximum(best, passed[s])  # by start of the segment
        for j in range(n + 1):
            total = np.maximum(reach[: j + 1], until[s, j] - until[s, : j + 1])
            choice[s, j] = int(total.argmin())
            value[j] = total[choice[s, j]]
        best = value
    stage = [0] * n
    end = n
    for s in range(size - 1, 0, -1):
        begin = int(choice[s, end])
        for k in range(begin, end):
            stage[order[k]] = s
        end = begin
    return repaired(costs, stage)


def repaired(costs: Costs, stage: Sequence[int]) -> list[int]:
    """Stages, raised until clusters are whole and tensors only go forward."""
    stage = list(stage)
    changed = True
    while changed:
        changed = False
        for cluster in costs.clusters:
            if len(cluster) > 1:
                top = max(stage[i] for i in cluster)
                for i in cluster:
                    if stage[i] < top:
                        stage[i], changed = top, True
        for i in range(len(stage)):
            least = max((stage[costs.producer[t]] for t in costs.inputs[i]), default=0)
            if stage[i] < least:
                stage[i], changed = least, True
    return stage


def annealed_stages(costs: Costs, line: DeviceOrder, stage: Sequence[int], *, rng: Random, steps: int, timer: Timer) -> StagedPlacement:
    """Stages after annealing, in which clusters move to a neighbouring stage: least overfull first, then the least bottleneck.

    Args:
        costs: the model.
        line: the stages.
        stage: by node; tensors have to go forward only.
        rng: draws.
        steps: most moves.
        timer: ends earlier.
    """
    loads = Loads(costs, line, stage)
    size = len(line.devices)
    value, over = loads.bottleneck_s(), loads.over_bytes()
    best, best_stage = (over, value), loads.stage[:]
    if size == 1:
        return staged(costs, line, stage)
    begun_s = timer.clock()
    movable: list[int] = []
    refresh = 0
    temperature = 0.01 * value
    for step in range(steps):
        if step % 32 == 0:
            done = step / steps
            if timer.end_s < math.inf:
                done = max(done, (timer.clock() - begun_s) / max(timer.end_s - begun_s, 1e-9))
            if done >= 1:
                break
            temperature = 0.01 * best[1] * 0.01**done
        if refresh <= 0:
            movable = [
                g
                for g, cluster in enumerate(costs.clusters)
                if any(0 <= loads.stage[cluster[0]] + by < size and loads.may_go(cluster, loads.stage[cluster[0]] + by) for by in (-1, 1))
            ]
            refresh = max(8, len(movable) // 4)
            if not movable:
                break
        cluster = costs.clusters[movable[rng.randrange(len(movable))]]
        home = loads.stage[cluster[0]]
        s = home + (1 if rng.random() < 0.5 else -1)
        if not 0 <= s < size or not loads.may_go(cluster, s):
            continue
        loads.move(cluster, s)
        new, new_over = loads.bottleneck_s(), loads.over_bytes()
        if new_over < over or (new_over == over and (new <= value or rng.random() < math.exp((value - new) / max(temperature, 1e-15)))):
            value, over = new, new_over
            refresh -= 1
            if (over, value) < best:
                best, best_stage = (over, value), loads.stage[:]
        else:
            loads.move(cluster, home)
    return staged(costs, line, best_stage)
