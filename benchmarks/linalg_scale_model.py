"""Discrete-event simulation of a LAmbdaPACK program on functions, for `benchmarks.linalg_scale`.

Real: the tasks, what follows from each (the unrolled graph, which tests hold equal to the analysis that functions ask), their order, the
flops of kernels, and the policy that starts functions (`benchmarks.provisioner.decide`). Modelled: a function reads one tile after the other, computes one task at a
time and writes likewise, all three at once for different tasks (pipelining); rates and latencies are constants; requests of the queue
take a latency each; a function keeps the tiles that it has touched last, ends after `idle_s` without a task, and takes no task that would
outlast its lifetime. With followers (a queue in a cache), a function that has computed a task and has no other one to compute begins with the first
task that waits for this one alone, unless a ready one comes first: it reads the other inputs, and what it has just made is in its memory.
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.provisioner import ScalingLimits, ScalingState, decide
from ephemeron.functions.tasks.model import QueueDepth
from ephemeron.linalg.analysis.unrolled import UnrolledGraph
from ephemeron.linalg.language.expressions import evaluate
from ephemeron.linalg.language.kernel import Kernel, load_kernel
from ephemeron.linalg.language.program import Node, Program, Role, TileReference

_POLL_S = 1.0
"""Between two looks of the provisioner."""


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """Constants of the model: functions of one vCPU, and S3."""

    functions: int = 512
    flops: float = 3e10
    """Of one function in a second."""
    mb_per_s: float = 75.0
    """In each direction (`linalg.matrices.stored.CLOUD`)."""
    latency_s: float = 0.03
    queue_s: float = 0.06
    """From the last byte of a task to its children being visible: its result and its counts, two requests of a cache or store."""
    start_s: float = 1.5
    lifetime_s: float = 900.0
    idle_s: float = 10.0
    memory_gb: float = 1.769
    in_flight: int = 3
    """Tasks that a function reads, computes and writes at the same time: NumPyWren's pipeline width."""
    cached_tiles: int = 3
    followers: bool = False


@dataclass(slots=True)
class Function:
    """A function, from its start."""

    name: str
    ready_at: float
    ends_at: float
    read_free: float
    cpu_free: float
    write_free: float
    in_flight: int = 0
    idle_since: float = 0.0
    computing_s: float = 0.0
    cache: OrderedDict[tuple[str, tuple[int, ...]], None] = field(default_factory=OrderedDict)
    gone: bool = False


@dataclass(slots=True)
class Outcome:
    """Figures of a simulated run."""

    seconds: float = 0.0
    tasks: int = 0
    flops: float = 0.0
    computing_s: float = 0.0
    active_s: float = 0.0
    """Sum over functions from start to end."""
    starts: int = 0
    bytes_read: float = 0.0
    bytes_written: float = 0.0
    requests: int = 0
    most_functions: int = 0
    samples: list[tuple[float, int, int, int, float]] = field(default_factory=list)
    """Time, functions, tasks in the queue, tasks that functions hold, computing seconds so far."""


class Simulated:
    """One run.

    Args:
        program: to run; all tiles are squares of `tile` rows.
        sizes: numbers of tiles.
        tile: rows of a tile.
        world: constants.
        limits: of the provisioner; `most` functions.
        static: all functions from the start to the end, as a cluster.
    """

    def __init__(
        self, program: Program, sizes: Mapping[str, int], *, tile: int, world: World, limits: ScalingLimits, static: bool = False
    ) -> None:
        self._graph, self._program, self._tile, self._world = UnrolledGraph(program, sizes), program, tile, world
        self._limits, self._static = limits, static
        self._kernels = {name: load_kernel(path) for name, path in program.kernels}
        self._temporary = {m.name for m in program.matrices if m.role is Role.TEMPORARY}
        self._lines = max(program.calls) + 1
        self._tile_s = 8 * tile * tile / (world.mb_per_s * 1e6)
        self._events: list[tuple[float, int, str, Any]] = []
        self._numbers = itertools.count()
        self._ready: list[tuple[int, Node]] = []
        self._waiting: dict[Node, int] = {}
        self._slots: list[dict[str, Function]] = [{} for _ in range(world.in_flight)]
        self._all: dict[str, Function] = {}
        self._followed: set[Node] = set()
        """Tasks that functions have begun before they were released."""
        self._leased = self._done = 0
        self._flops_of: dict[tuple[int, tuple[tuple[str, object], ...]], float] = {}
        self.out = Outcome()

    def run(self) -> Outcome:
        """Simulates until the last task has ended."""
        total, state, now = self._graph.count(), ScalingState(), 0.0
        for node in self._graph.start_nodes():
            self._release(node)
        self._at(0.0, "scale", None)
        while self._done < total:
            now, _, kind, what = heapq.heappop(self._events)
            if kind == "scale":
                state = self._scale(now, state)
            elif kind == "begin":
                self._slots[0][what.name] = what
                what.idle_since = now
                self._dispatch(now)
            elif kind == "computed":
                self._follow(now, *what)
            elif kind == "stored":
                self._stored(now, *what)
            elif kind == "visible":
                for child in what:
                    self._release(child)
                self._dispatch(now)
            elif (kind == "idle" and not what.in_flight and now - what.idle_since >= self._world.idle_s - 1e-9) or (
                kind == "lifetime" and not what.in_flight
            ):
                self._end(what, now)
        for function in list(self._all.values()):
            self._end(function, now)
        self.out.seconds, self.out.tasks = now, total
        self.out.samples.append((now, 0, 0, 0, self.out.computing_s))
        return self.out

    def _at(self, when: float, kind: str, what: object) -> None:
        heapq.heappush(self._events, (when, next(self._numbers), kind, what))

    def _release(self, node: Node) -> None:
        heapq.heappush(self._ready, (self._order(node), node))

    def _order(self, node: Node) -> int:
        first = node.indices[0] if node.indices else 0
        return first * self._lines + node.line

    def _scale(self, now: float, state: ScalingState) -> ScalingState:
        """One look of the provisioner."""
        if self._static:
            state = state if state.next_number > 1 else self._start_all(now, state)
        else:
            depth = QueueDepth(
                ready=len(self._ready), leased=self._leased, executors=frozenset(n for n, f in self._all.items() if f.ready_at <= now)
            )
            decision = decide(self._limits, state, depth, now=now)
            state = decision.state
            for number in decision.start:
                self._start(f"{number}-f", now)
        self.out.samples.append((now, len(self._all), len(self._ready), self._leased, self.out.computing_s))
        self._at(now + _POLL_S, "scale", None)
        return state

    def _start_all(self, now: float, state: ScalingState) -> ScalingState:
        for number in range(1, self._world.functions + 1):
            self._start(f"{number}-f", now)
        return ScalingState(next_number=self._world.functions + 1)

    def _start(self, name: str, now: float) -> None:
        at = now + self._world.start_s
        ends = float("inf") if self._static else at + self._world.lifetime_s
        function = self._all[name] = Function(name, at, ends, at, at, at)
        self.out.starts += 1
        self.out.most_functions = max(self.out.most_functions, len(self._all))
        self._at(at, "begin", function)
        if not self._static:
            self._at(ends, "lifetime", function)
            self._at(at + self._world.idle_s, "idle", function)

    def _end(self, function: Function, now: float) -> None:
        if function.gone:
            return
        function.gone = True
        del self._all[function.name]
        for slot in self._slots:
            slot.pop(function.name, None)
        self.out.active_s += max(0.0, now - function.ready_at)

    def _dispatch(self, now: float) -> None:
        """Functions take the first tasks of the queue, those with the fewest tasks first."""
        for slot in self._slots:
            while self._ready and slot:
                name, function = slot.popitem()
                if not self._lease(function, now):
                    continue  # its lifetime nears; it is not asked again
                if function.in_flight < self._world.in_flight:
                    self._slots[function.in_flight][name] = function
            if not self._ready:
                return

    def _lease(self, function: Function, now: float) -> bool:
        if not self._begin(function, self._ready[0][1], now):
            if not function.in_flight:
                self._end(function, now)
            return False
        heapq.heappop(self._ready)
        return True

    def _begin(self, function: Function, node: Node, now: float) -> bool:
        """Begins a task, unless it would outlast the function."""
        world, graph = self._world, self._graph
        tiles = list(dict.fromkeys(graph.reads(node)))
        missing = [tile for tile in tiles if tile not in function.cache]
        writes = graph.writes(node)
        read = max(now, function.read_free) + world.latency_s + len(missing) * self._tile_s
        flops = self._flops(node)
        compute_s = flops / world.flops
        computed = max(read, function.cpu_free) + compute_s
        written = max(computed, function.write_free) + world.latency_s + len(writes) * self._tile_s
        if written + 1.0 > function.ends_at:
            return False
        self._leased += 1
        function.in_flight += 1
        function.read_free, function.cpu_free, function.write_free = read, computed, written
        for tile in (*tiles, *writes):
            function.cache[tile] = None
            function.cache.move_to_end(tile)
        while len(function.cache) > world.cached_tiles:
            function.cache.popitem(last=False)
        out, size = self.out, 8.0 * self._tile * self._tile
        out.flops += flops
        out.bytes_read += len(missing) * size
        out.bytes_written += len(writes) * size
        out.requests += len(missing) + len(writes)
        if world.followers:
            self._at(computed, "computed", (function, node))
        self._at(written, "stored", (function, node, compute_s))
        return True

    def _follow(self, now: float, function: Function, node: Node) -> None:
        """A function has computed a task."""
        if function.gone or function.cpu_free > now or function.in_flight >= self._world.in_flight:
            return
        graph, waiting = self._graph, self._waiting
        last = [c for c in graph.downstream(node) if waiting.get(c, graph.upstream_count(c)) == 1 and c not in self._followed]
        child = min(last, key=self._order, default=None)
        if child is None or (self._ready and self._ready[0][0] < self._order(child)):
            return
        slot = self._slots[function.in_flight]
        if self._begin(function, child, now):
            self._followed.add(child)
            if slot.pop(function.name, None) is not None and function.in_flight < self._world.in_flight:
                self._slots[function.in_flight][function.name] = function

    def _stored(self, now: float, function: Function, node: Node, compute_s: float) -> None:
        self._done += 1
        self._leased -= 1
        function.in_flight -= 1
        function.computing_s += compute_s
        self.out.computing_s += compute_s
        ready = []
        for child in self._graph.downstream(node):
            left = self._waiting.pop(child, None)
            left = (self._graph.upstream_count(child) if left is None else left) - 1
            if left:
                self._waiting[child] = left
            elif child not in self._followed:
                ready.append(child)
        if ready:
            self._at(now + self._world.queue_s, "visible", ready)
        for slot in self._slots:
            slot.pop(function.name, None)
        if not function.gone and now < function.ends_at - 1.0:
            self._slots[function.in_flight][function.name] = function
            if not function.in_flight and not self._static:
                function.idle_since = now
                self._at(now + self._world.idle_s, "idle", function)
        elif not function.in_flight:
            self._end(function, now)
        self._dispatch(now)

    def _flops(self, node: Node) -> float:
        """Of a task. All tiles are whole, so it depends on its line, and on integers among its arguments."""
        call = self._graph.call(node)
        key = (node.line, ())
        if key not in self._flops_of:
            kernel: Kernel = self._kernels[call.kernel]
            values = self._graph.bindings(node)
            shape = (self._tile, self._tile)
            arguments = [shape if isinstance(a, TileReference) else evaluate(a, values) for a in call.arguments]
            options = {name: value for name, value in call.options if isinstance(value, (bool, int, float, str))}
            self._flops_of[key] = kernel.flops(*arguments, **options) if kernel.flops else 0.0
        return self._flops_of[key]


def curve(out: Outcome, world: World, *, parts: int = 40) -> list[dict[str, float]]:
    """Parallelism over time: for so many equal parts of a run the means of functions, of ready tasks, and of tasks that functions hold, the
    share of all vCPUs that computes, and the share of the functions that run."""
    rows, width = [], out.seconds / parts
    for part in range(parts):
        begin, end = part * width, (part + 1) * width
        inside = [s for s in out.samples if begin <= s[0] < end] or [min(out.samples, key=lambda s: abs(s[0] - begin))]
        functions, ready, held = (sum(s[n] for s in inside) / len(inside) for n in (1, 2, 3))
        busy = (_at_time(out, end) - _at_time(out, begin)) / width
        rows.append(
            {
                "until_s": round(end, 1),
                "functions": round(functions, 1),
                "ready_tasks": round(ready, 1),
                "held_tasks": round(held, 1),
                "computing": round(busy / world.functions, 4),
                "computing_of_functions": round(min(1.0, busy / max(1.0, functions)), 4),
            }
        )
    return rows


def _at_time(out: Outcome, when: float) -> float:
    """Computing seconds until a moment, between samples in proportion."""
    place = bisect.bisect_left(out.samples, when, key=lambda s: s[0])
    before = out.samples[place - 1] if place else (0.0, 0, 0, 0, 0.0)
    if place == len(out.samples):
        return before[4]
    after = out.samples[place]
    share = (when - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 1.0
    return before[4] + share * (after[4] - before[4])
