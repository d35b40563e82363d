"""Schedule simulator: replays a placement exactly. Its result counts where it differs from a solver's.

It shares no code with the solvers; both read the graph and the topology. Time is simulated event by event:

- a device runs one pass of one node at a time, a link one transfer at a time (NetSplit's 5-11 to 5-18 demand neither);
- a tensor is sent once to each device that reads it; there, the gradients of all its readers are summed and sent back once;
- a node's backward pass waits for its own forward pass and for its readers' backward passes (5-12, 5-16);
- devices and links follow given orders, and wait if necessary. Without orders, a free device runs a task that is ready: with the
  whole batch the one with the longest remaining path, with micro-batches backward passes and older micro-batches first; links are
  first-come, first-served;
- with `recompute` a stage is a unit: a pass of one micro-batch begins when all its inputs from other devices have arrived, and
  nothing else runs on the device until it ends. Each node's backward pass computes its activations again.

Memory is computed in `simulator`.

Memory of a simulated schedule; shares no code with the solvers.

Memory is reported twice. `reserved_for` is equation 5-18 for every micro-batch that may be in flight, and decides whether a placement
fits. `peaks` is the maximum over time, with each tensor from the start of its producer to the end of the last backward pass that
needs it; it is never more. With `recompute`, tensors inside a stage count once. Tensors that cross a stage boundary, inputs of the
model included, count for every micro-batch in flight: outputs may wait for a slow link, and gradients may arrive early.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from ephemeron.errors import JobError
from ephemeron.partition.graph.graph import Graph, Tensor
from ephemeron.partition.graph.topology import Device, Topology
from ephemeron.partition.schedule_simulator.schedule import DeviceOrders, Pass, Replay, ReplaySpan, Schedule, Task
from ephemeron.partition.schedule_simulator.task_graph import Resource, TaskTemplate, check_placement, tasks_of

Takes = Callable[[Task, int, float], float]
PLAIN = Schedule()


def replay(
    graph: Graph,
    topology: Topology,
    placement: Mapping[str, str],
    *,
    schedule: Schedule = PLAIN,
    orders: DeviceOrders | None = None,
    stages: Sequence[str] = (),
    takes: Takes | None = None,
) -> Replay:
    """Simulation of one iteration.

    Args:
        graph: the model.
        topology: devices and links.
        placement: the device of every node.
        schedule: of the micro-batches.
        orders: of tasks on devices and links; only with the whole batch. None: by the rules above.
        stages: used devices in the order of the pipeline; with 1F1B a device keeps the more micro-batches in flight the earlier it
            comes, so stages that exchange no tensor are not interchangeable. Empty: their order in the graph.
        takes: seconds of a task of a micro-batch, given its seconds by graph and topology, to simulate passes whose times vary.
            None: seconds by graph and topology.

    Raises:
        JobError: a node without a device, on an unknown device, or apart from its group; a device's kind has no times; orders
            that are not of this placement, or that form a deadlock; recomputing without stages; stages in an order that does not run.
    """
    devices = {d.name: d for d in topology.devices}
    check_placement(graph, devices, placement)
    if orders is not None and schedule.micro_batches > 1:
        raise JobError(f"orders are for a whole batch, not for micro_batches = {schedule.micro_batches}", remedy="leave them out")
    tasks = tasks_of(graph, topology, placement, schedule)
    order = _stages(graph, placement, stages)
    if schedule.recompute and not order:
        raise JobError(
            "schedule: recompute needs stages, and in this placement tensors go in both directions between devices",
            remedy="take a placement in which they only go forward, or leave recompute out",
        )
    in_flight = _in_flight(schedule, order, set(placement.values()))
    spans = _simulate(tasks, schedule, in_flight, orders, takes or _as_planned)
    busy: dict[Resource, float] = {}
    for span in spans:
        busy[span.resource] = busy.get(span.resource, 0.0) + span.end_s - span.start_s
    reserved = reserved_for(graph, devices, placement, schedule, in_flight)
    return Replay(
        iteration_s=max(s.end_s for s in spans),
        bottleneck_s=max(busy.values()) / schedule.micro_batches,
        busy_s=busy,
        stages=order,
        in_flight=in_flight,
        peak_bytes=peaks(graph, devices, placement, schedule, spans),
        reserved_bytes=reserved,
        over_bytes={d: b - devices[d].memory_bytes for d, b in reserved.items() if b > devices[d].memory_bytes},
        spans=tuple(spans),
    )


def reserved_bytes(
    graph: Graph, topology: Topology, placement: Mapping[str, str], *, schedule: Schedule = PLAIN, stages: Sequence[str] = ()
) -> dict[str, int]:
    """`Replay.reserved_bytes` of a placement without a replay. Arguments and errors as for `replay`."""
    in_flight = _in_flight(schedule, _stages(graph, placement, stages), set(placement.values()))
    return reserved_for(graph, {d.name: d for d in topology.devices}, placement, schedule, in_flight)


def _stages(graph: Graph, placement: Mapping[str, str], given: Sequence[str]) -> tuple[str, ...]:
    """Devices such that tensors only go forward: in the order given, or as in the graph; empty if there is no such order.

    Raises:
        JobError: the order given lacks a device, names one that is not used, or sends a tensor backwards.
    """
    used = list(dict.fromkeys(placement[name] for name in graph.topological_order()))
    feeds = {(placement[t.producer], placement[c]) for t in graph.tensors for c in t.consumers if placement[t.producer] != placement[c]}
    if given:
        if sorted(given) != sorted(used):
            raise JobError(f"stages = {', '.join(given)} should name each used device once: {', '.join(used)}")
        backwards = sorted((a, b) for a, b in feeds if given.index(a) > given.index(b))
        if backwards:
            source, target = backwards[0]
            raise JobError(f"stages: {source} sends to {target} and comes after it", remedy="take stages and placement of one plan")
        return tuple(given)
    order: list[str] = []
    while len(order) < len(used):
        ready = [d for d in used if d not in order and not any(b == d and a not in order for a, b in feeds)]
        if not ready:
            return ()
        order.append(ready[0])
    return tuple(order)


def _in_flight(schedule: Schedule, stages: Sequence[str], used: set[str]) -> dict[str, int]:
    if schedule.kind != "1f1b":
        return dict.fromkeys(sorted(used), schedule.micro_batches)
    size = len(used)
    if not stages:  # no pipeline: as many as a first stage would keep, everywhere
        limits = dict.fromkeys(sorted(used), 2 * size - 1 if schedule.overlap else size)
    else:
        limits = {d: 2 * (size - s) - 1 if schedule.overlap else size - s for s, d in enumerate(stages)}
    return {d: min(k, schedule.micro_batches) for d, k in limits.items()}


def _as_planned(task: Task, micro_batch: int, seconds: float) -> float:
    return seconds


def _simulate(
    jobs: list[TaskTemplate], schedule: Schedule, in_flight: Mapping[str, int], orders: DeviceOrders | None, takes: Takes
) -> list[ReplaySpan]:
    """Spans in order of time. Instance m·|jobs| + j is job j of micro-batch m; larger numbers are gates, which take no time."""
    parts, size = schedule.micro_batches, len(jobs)
    after: list[list[int]] = [[m * size + j for j in job.after] for m in range(parts) for job in jobs]
    waits = [job.waits for _ in range(parts) for job in jobs]
    _add_gates(jobs, schedule, in_flight, after, waits)
    if schedule.recompute:
        _add_stage_gates(jobs, parts, after, waits)
    passes = _StagePasses(jobs) if schedule.recompute else None
    queues: dict[Resource, list[tuple[float, float, float, int]]] = {job.resource: [] for job in jobs}
    plans = _plans(jobs, orders)
    idle = set(queues)
    running: list[tuple[float, int]] = []
    spans: list[ReplaySpan] = []

    def release(i: int, now_s: float) -> None:
        if i >= parts * size:  # a gate: releases its tasks at once
            for j in after[i]:
                waits[j] -= 1
                if waits[j] == 0:
                    release(j, now_s)
            return
        m, job = i // size, jobs[i % size]
        if isinstance(job.resource, tuple):
            key = (now_s, float(m), -job.rank_s)
        elif schedule.kind == "plain":
            key = (-job.rank_s, 0.0, 0.0)
        else:
            key = (float(job.task[1] == "forward"), float(m), -job.rank_s)
        heapq.heappush(queues[job.resource], (*key, i))

    for i in [i for i, w in enumerate(waits) if w == 0]:
        release(i, 0.0)
    now_s = 0.0
    while True:
        for resource in [r for r in queues if r in idle and queues[r]]:
            if passes is not None and isinstance(resource, str):
                chosen = passes.next(resource, queues[resource], plans.get(resource))
            else:
                chosen = _next(queues[resource], plans.get(resource))
            if chosen is None:
                continue
            idle.discard(resource)
            spans.append(_span(jobs[chosen % size], chosen // size, now_s, takes))
            heapq.heappush(running, (spans[-1].end_s, chosen))
        if not running:
            break
        now_s = running[0][0]
        while running and running[0][0] <= now_s:
            _, i = heapq.heappop(running)
            idle.add(jobs[i % size].resource)
            for j in after[i]:
                waits[j] -= 1
                if waits[j] == 0:
                    release(j, now_s)
    if len(spans) < parts * size:
        stuck = sorted({str(job.resource) for i, job in enumerate(jobs) if waits[i] > 0 or queues[job.resource]})
        raise JobError(
            f"orders: deadlock after {now_s:g} s, on {', '.join(stuck)}", remedy="an order must not put a task before one that it needs"
        )
    return spans


def _span(job: TaskTemplate, micro_batch: int, start_s: float, takes: Takes) -> ReplaySpan:
    what, direction = job.task
    return ReplaySpan(
        resource=job.resource,
        what=what,
        direction=direction,
        micro_batch=micro_batch,
        start_s=start_s,
        end_s=start_s + takes(job.task, micro_batch, job.seconds),
    )


def _add_gates(
    jobs: list[TaskTemplate], schedule: Schedule, in_flight: Mapping[str, int], after: list[list[int]], waits: list[int]
) -> None:
    """Gates of GPipe (backward passes of a device after all its forward passes) and 1F1B (a limit of micro-batches in flight)."""
    parts, size = schedule.micro_batches, len(jobs)
    for device in in_flight:
        forward = [j for j, job in enumerate(jobs) if job.resource == device and job.task[1] == "forward"]
        backward = [j for j, job in enumerate(jobs) if job.resource == device and job.task[1] == "backward"]
        gates: list[tuple[list[int], list[int]]] = []
        if schedule.kind == "gpipe":
            everyone = range(parts)
            gates.append(([m * size + j for m in everyone for j in forward], [m * size + j for m in everyone for j in backward]))
        elif schedule.kind == "1f1b":
            k = in_flight[device]
            for m in range(k, parts):
                gates.append(([(m - k) * size + j for j in backward], [m * size + j for j in forward]))
        for before, then in gates:
            gate = len(after)
            after.append(then)
            waits.append(len(before))
            for i in before:
                after[i].append(gate)
            for i in then:
                waits[i] += 1


def _add_stage_gates(jobs: list[TaskTemplate], parts: int, after: list[list[int]], waits: list[int]) -> None:
    """Gates of recomputation: a stage's pass of one micro-batch begins when all its inputs from other devices have arrived."""
    size = len(jobs)
    passes: dict[tuple[str, Pass], set[int]] = {}
    for j, job in enumerate(jobs):
        if isinstance(job.resource, str):
            passes.setdefault((job.resource, job.task[1]), set()).add(j)
    for inside in passes.values():
        before = [i for i, job in enumerate(jobs) if i not in inside and not inside.isdisjoint(job.after)]
        for m in range(parts) if before else ():
            gate = len(after)
            after.append([m * size + j for j in sorted(inside)])
            waits.append(len(before))
            for i in before:
                after[m * size + i].append(gate)
            for j in inside:
                waits[m * size + j] += 1


class _StagePasses:
    """Pass that runs on each device, from its first task to its last."""

    def __init__(self, jobs: list[TaskTemplate]) -> None:
        self.jobs = jobs
        self.size = Counter((job.resource, job.task[1]) for job in jobs)
        self.now: dict[Resource, tuple[int, Pass, int]] = {}
        """Micro-batch, pass, and number of its tasks that have not begun."""

    def next(self, resource: Resource, queue: list[tuple[float, float, float, int]], plan: list[int] | None) -> int | None:
        """Task that begins now, as `_next`, but from the running pass only until it has ended."""
        m, direction, left = self.now.get(resource, (0, "forward", 0))
        if left and plan is None:
            own = [entry for entry in queue if self._pass_of(entry[3]) == (m, direction)]
            chosen: int | None = min(own)[3]  # of a pass that has begun, something is always ready when the device is free
            queue[:] = [entry for entry in queue if entry[3] != chosen]
            heapq.heapify(queue)
        else:
            chosen = _next(queue, plan)
        if chosen is None:
            return None
        running = self._pass_of(chosen)
        if not left:
            left = self.size[resource, running[1]]
        self.now[resource] = (*running, left - 1)
        return chosen

    def _pass_of(self, i: int) -> tuple[int, Pass]:
        return i // len(self.jobs), self.jobs[i % len(self.jobs)].task[1]


def _plans(jobs: list[TaskTemplate], orders: DeviceOrders | None) -> dict[Resource, list[int]]:
    """Planned instances by resource, last first."""
    if orders is None:
        return {}
    plans: dict[Resource, list[int]] = {}
    given: dict[Resource, Sequence[Task]] = {}
    for device, passes in orders.compute.items():
        given[device] = passes
    for link, sends in orders.transfers.items():
        given[link] = sends
    for resource in dict.fromkeys(job.resource for job in jobs):
        known = {job.task: i for i, job in enumerate(jobs) if job.resource == resource}
        sequence = given.get(resource, ())
        if Counter(sequence) != Counter(known.keys()):
            expected = Counter(known.keys())
            wrong = sorted((Counter(sequence) - expected) + (expected - Counter(sequence)))
            raise JobError(
                f"orders for {resource} do not name each of its tasks once: {wrong[0][0]} ({wrong[0][1]})",
                remedy="take orders and placement from the same plan",
            )
        plans[resource] = [known[task] for task in reversed(sequence)]
    return plans


def _next(queue: list[tuple[float, float, float, int]], plan: list[int] | None) -> int | None:
    """Task that the resource begins now, removed from queue and plan; None: the next task of the plan is not ready."""
    if plan is None:
        return heapq.heappop(queue)[3]
    for k, entry in enumerate(queue):
        if entry[3] == plan[-1]:
            queue[k] = queue[-1]
            queue.pop()
            heapq.heapify(queue)
            return plan.pop()
    return None


# -- memory of a simulated schedule; shares no code with the solvers ----------------------------------------------


def reserved_for(
    graph: Graph, devices: Mapping[str, Device], placement: Mapping[str, str], schedule: Schedule, in_flight: Mapping[str, int]
) -> dict[str, int]:
    """Bytes that every device needs if it frees nothing early: equation 5-18 for all micro-batches in flight."""
    held = dict.fromkeys(devices, 0)
    for n in graph.nodes:
        held[placement[n.name]] += n.state_bytes
    inner = _inner(graph, placement) if schedule.recompute else frozenset()
    for t in graph.tensors:
        copies = 1 if t.name in inner else in_flight[placement[t.producer]]
        for device in {placement[t.producer], *(placement[c] for c in t.consumers)}:
            held[device] += copies * _part_bytes(t, schedule.micro_batches)
    return held


def _inner(graph: Graph, placement: Mapping[str, str]) -> frozenset[str]:
    """Tensors that are recomputed: no other device reads them, and their producer is no input of the model."""
    fed = {c for t in graph.tensors for c in t.consumers}
    return frozenset(t.name for t in graph.tensors if t.producer in fed and all(placement[c] == placement[t.producer] for c in t.consumers))


def _part_bytes(t: Tensor, parts: int) -> int:
    return -(-t.nbytes // parts) + -(-t.gradient_bytes // parts)


def peaks(
    graph: Graph, devices: Mapping[str, Device], placement: Mapping[str, str], schedule: Schedule, spans: Sequence[ReplaySpan]
) -> dict[str, int]:
    """Maximum of bytes at any time: tensors from the start of their producer until no backward pass needs them, gradients likewise.

    With recomputation, the producing device frees a tensor when the forward passes that read it there have ended and it is sent, and has
    it again from its first backward pass on; inputs of the model stay.
    """
    parts = schedule.micro_batches
    when: dict[tuple[str, Pass, int, str], ReplaySpan] = {}
    again_s: dict[tuple[str, int], float] = {}
    for s in spans:
        away = "" if isinstance(s.resource, str) else s.resource[s.direction == "forward"]
        when[s.what, s.direction, s.micro_batch, away] = s
        if isinstance(s.resource, str) and s.direction == "backward":
            again_s.setdefault((s.resource, s.micro_batch), s.start_s)  # spans are in the order in which they began
    fed = {c for t in graph.tensors for c in t.consumers}
    steps: dict[str, list[tuple[float, int]]] = {d: [] for d in devices}

    def hold(device: str, nbytes: int, start_s: float, end_s: float) -> None:
        if nbytes and end_s > start_s:
            steps[device] += [(start_s, nbytes), (end_s, -nbytes)]

    for t in graph.tensors:
        home = placement[t.producer]
        size, gradient = -(-t.nbytes // parts), -(-t.gradient_bytes // parts)
        readers: dict[str, list[str]] = {}
        for c in t.consumers:
            readers.setdefault(placement[c], []).append(c)
        for m in range(parts):
            made, used = when[t.producer, "forward", m, ""], when[t.producer, "backward", m, ""]
            if schedule.recompute and t.producer in fed:
                sent_s = [when[t.name, "forward", m, d].end_s for d in readers if d != home]
                read_s = [when[c, "forward", m, ""].end_s for c in readers.get(home, ())]
                given_up_s = max([made.end_s, *sent_s, *read_s])
                hold(home, size, made.start_s, given_up_s)
                hold(home, size, again_s[home, m], used.end_s)
            else:
                hold(home, size, made.start_s, used.end_s)
            begun = [used.start_s]
            for device, names in readers.items():
                first = min(when[c, "backward", m, ""].start_s for c in names)
                last = max(when[c, "backward", m, ""].end_s for c in names)
                if device == home:
                    begun.append(first)
                    continue
                hold(device, size, when[t.name, "forward", m, device].start_s, last)
                if gradient:
                    sent = when[t.name, "backward", m, device]
                    hold(device, gradient, first, sent.end_s)
                    begun.append(sent.start_s)
            hold(home, gradient, min(begun), used.end_s)
    found: dict[str, int] = {}
    states = Counter[str]()
    for n in graph.nodes:
        states[placement[n.name]] += n.state_bytes
    for device, changes in steps.items():
        held = most = states[device]
        for _, change in sorted(changes):  # at equal times, ends come before beginnings
            held += change
            most = max(most, held)
        found[device] = most
    return found
