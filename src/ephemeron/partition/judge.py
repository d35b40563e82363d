"""The judge: replays a placement exactly, and is believed where it differs from a solver.

It shares no code with the solvers and no numbers but the graph's and the topology's. Time is simulated event by event:

- a device runs one pass of one node at a time, a link one transfer at a time (NetSplit's 5-11 to 5-18 demand neither);
- a tensor is sent once to each device that reads it; there, gradients of all its readers are added up and sent back once;
- a node's backward pass waits for its own forward pass and for its readers' backward passes (5-12, 5-16);
- with orders given, devices and links keep to them, and wait; without, a free device takes what is ready: the longest way
  to go first with the batch whole, backward passes and older micro-batches first with `1f1b`; links serve who came first.

Memory is reported twice. `reserved_bytes` is equation 5-18 for every micro-batch that may be in flight, and decides whether a
placement fits. `peak_bytes` is what was held over time, from when a tensor is begun until the last backward pass that needs it
ends; it is never more.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ephemeron.errors import JobError
from ephemeron.partition.graph import Graph, Tensor
from ephemeron.partition.replay import Replay, Span
from ephemeron.partition.schedule import Orders, Pass, Schedule, Task
from ephemeron.partition.topology import Device, Topology

Resource = str | tuple[str, str]
PLAIN = Schedule()


def replay(
    graph: Graph,
    topology: Topology,
    placement: Mapping[str, str],
    *,
    schedule: Schedule = PLAIN,
    orders: Orders | None = None,
) -> Replay:
    """Replays one iteration.

    Args:
        graph: what is run.
        topology: on what.
        placement: the device of every node.
        schedule: how micro-batches follow one another.
        orders: in which order devices and links work; only with the batch whole. None: by the rule above.

    Raises:
        JobError: a node is not placed, or placed on no device, or apart from its group; a device's kind has no times; orders
            that are not of this placement, or in which everybody waits for everybody.
    """
    devices = {d.name: d for d in topology.devices}
    check_placement(graph, devices, placement)
    if orders is not None and schedule.micro_batches > 1:
        raise JobError(
            f"orders are for a whole batch, not for micro_batches = {schedule.micro_batches}", remedy="leave them out"
        )
    tasks = _tasks(graph, topology, placement, schedule.micro_batches)
    stages = _stages(graph, placement)
    in_flight = _in_flight(schedule, stages, set(placement.values()))
    spans = _simulate(tasks, schedule, in_flight, orders)
    busy: dict[Resource, float] = {}
    for span in spans:
        busy[span.resource] = busy.get(span.resource, 0.0) + span.end_s - span.start_s
    reserved = _reserved(graph, devices, placement, schedule.micro_batches, in_flight)
    return Replay(
        iteration_s=max(s.end_s for s in spans),
        bottleneck_s=max(busy.values()) / schedule.micro_batches,
        busy_s=busy,
        stages=stages,
        in_flight=in_flight,
        peak_bytes=_peaks(graph, devices, placement, schedule.micro_batches, spans),
        reserved_bytes=reserved,
        over_bytes={d: b - devices[d].memory_bytes for d, b in reserved.items() if b > devices[d].memory_bytes},
        spans=tuple(spans),
    )


def check_placement(graph: Graph, devices: Mapping[str, Device], placement: Mapping[str, str]) -> None:
    """Every node on a device that has times for it, groups together.

    Raises:
        JobError: it is not so.
    """
    home: dict[str, tuple[str, str]] = {}
    for n in graph.nodes:
        at = placement.get(n.name)
        if at is None:
            raise JobError(f"placement: node {n.name} is on no device", remedy="place every node")
        if at not in devices:
            raise JobError(
                f"placement: node {n.name} is on {at}, which is no device", remedy=f"use {', '.join(devices)}"
            )
        if devices[at].kind not in n.forward_s:
            raise JobError(
                f"device {at} is of the kind {devices[at].kind}, for which node {n.name} has no times",
                remedy=f"measure it, or use one of {', '.join(sorted(n.forward_s))}",
            )
        if n.group is not None:
            first, place = home.setdefault(n.group, (n.name, at))
            if place != at:
                raise JobError(
                    f"placement: group {n.group} is torn apart: {first} is on {place}, {n.name} on {at}",
                    remedy="place a group's nodes on one device",
                )


@dataclass(slots=True)
class _Job:
    """One task of one micro-batch, as a template for all."""

    resource: Resource
    task: Task
    at: str
    """Of a transfer: the reading device, so that several of one tensor are apart."""
    seconds: float
    after: list[int] = field(default_factory=list)
    waits: int = 0
    rank_s: float = 0.0
    """Longest way to the end, this task included."""


def _tasks(graph: Graph, topology: Topology, placement: Mapping[str, str], parts: int) -> list[_Job]:
    """All tasks of one micro-batch with what waits for what."""
    devices = {d.name: d for d in topology.devices}
    links = {(k.source, k.target): k for k in topology.links}
    jobs: list[_Job] = []
    number: dict[tuple[str, Pass, str], int] = {}

    def add(resource: Resource, what: str, direction: Pass, seconds: float, at: str = "") -> None:
        number[what, direction, at] = len(jobs)
        jobs.append(_Job(resource=resource, task=(what, direction), at=at, seconds=seconds))

    def order(first: tuple[str, Pass, str], then: tuple[str, Pass, str]) -> None:
        jobs[number[first]].after.append(number[then])
        jobs[number[then]].waits += 1

    for n in graph.nodes:
        device = devices[placement[n.name]]
        add(device.name, n.name, "forward", n.forward_s[device.kind] / device.speed / parts)
        add(device.name, n.name, "backward", n.backward_s[device.kind] / device.speed / parts)
        order((n.name, "forward", ""), (n.name, "backward", ""))
    for t in graph.tensors:
        home = placement[t.producer]
        for away in dict.fromkeys(placement[c] for c in t.consumers):
            readers = [c for c in t.consumers if placement[c] == away]
            if away == home:
                for c in readers:
                    order((t.producer, "forward", ""), (c, "forward", ""))
                    order((c, "backward", ""), (t.producer, "backward", ""))
                continue
            # names of tensors and nodes may coincide: transfers are told apart by `at`, which nodes leave empty
            add((home, away), t.name, "forward", links[home, away].seconds(t.nbytes / parts), away)
            order((t.producer, "forward", ""), (t.name, "forward", away))
            if t.gradient_bytes:
                add((away, home), t.name, "backward", links[away, home].seconds(t.gradient_bytes / parts), away)
                order((t.name, "backward", away), (t.producer, "backward", ""))
            for c in readers:
                order((t.name, "forward", away), (c, "forward", ""))
                sent = (t.name, "backward", away) if t.gradient_bytes else (t.producer, "backward", "")
                order((c, "backward", ""), sent)  # type: ignore[arg-type]
    _rank(jobs)
    return jobs


def _rank(jobs: list[_Job]) -> None:
    waits = [job.waits for job in jobs]
    free = [i for i, w in enumerate(waits) if w == 0]
    for i in free:  # grows as it is read
        for j in jobs[i].after:
            waits[j] -= 1
            if waits[j] == 0:
                free.append(j)
    for i in reversed(free):
        jobs[i].rank_s = jobs[i].seconds + max((jobs[j].rank_s for j in jobs[i].after), default=0.0)


def _stages(graph: Graph, placement: Mapping[str, str]) -> tuple[str, ...]:
    """Devices such that tensors only go forward; empty if there is no such order."""
    used = list(dict.fromkeys(placement[name] for name in graph.topological_order()))
    feeds = {
        (placement[t.producer], placement[c]) for t in graph.tensors for c in t.consumers if placement[t.producer] != placement[c]
    }  # fmt: skip
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


def _simulate(jobs: list[_Job], schedule: Schedule, in_flight: Mapping[str, int], orders: Orders | None) -> list[Span]:
    """Events in order of time. Instance m·|jobs| + j is job j of micro-batch m; numbers beyond are gates, which take no time."""
    parts, size = schedule.micro_batches, len(jobs)
    after: list[list[int]] = [[m * size + j for j in job.after] for m in range(parts) for job in jobs]
    waits = [job.waits for _ in range(parts) for job in jobs]
    _add_gates(jobs, schedule, in_flight, after, waits)
    queues: dict[Resource, list[tuple[float, float, float, int]]] = {job.resource: [] for job in jobs}
    plans = _plans(jobs, orders)
    idle = set(queues)
    running: list[tuple[float, int]] = []
    spans: list[Span] = []

    def release(i: int, now_s: float) -> None:
        if i >= parts * size:  # a gate: opens what it held back, at once
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
            chosen = _next(queues[resource], plans.get(resource))
            if chosen is None:
                continue
            idle.discard(resource)
            spans.append(_span(jobs[chosen % size], chosen // size, now_s))
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
            f"orders: after {now_s:g} s everybody waits for somebody else, on {', '.join(stuck)}",
            remedy="an order must not put a task before one that it needs",
        )
    return spans


def _span(job: _Job, micro_batch: int, start_s: float) -> Span:
    what, direction = job.task
    return Span(
        resource=job.resource,
        what=what,
        direction=direction,
        micro_batch=micro_batch,
        start_s=start_s,
        end_s=start_s + job.seconds,
    )


def _add_gates(
    jobs: list[_Job], schedule: Schedule, in_flight: Mapping[str, int], after: list[list[int]], waits: list[int]
) -> None:
    """GPipe: backward passes of a device after all its forward passes. 1F1B: at most so many micro-batches in flight."""
    parts, size = schedule.micro_batches, len(jobs)
    for device in in_flight:
        forward = [j for j, job in enumerate(jobs) if job.resource == device and job.task[1] == "forward"]
        backward = [j for j, job in enumerate(jobs) if job.resource == device and job.task[1] == "backward"]
        gates: list[tuple[list[int], list[int]]] = []
        if schedule.kind == "gpipe":
            everyone = range(parts)
            gates.append(
                ([m * size + j for m in everyone for j in forward], [m * size + j for m in everyone for j in backward])
            )
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


def _plans(jobs: list[_Job], orders: Orders | None) -> dict[Resource, list[int]]:
    """Instances by resource, last first."""
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
    """What the resource begins now; taken off both lists."""
    if plan is None:
        return heapq.heappop(queue)[3]
    for k, entry in enumerate(queue):
        if entry[3] == plan[-1]:
            queue[k] = queue[-1]
            queue.pop()
            heapq.heapify(queue)
            return plan.pop()
    return None


def _reserved(
    graph: Graph, devices: Mapping[str, Device], placement: Mapping[str, str], parts: int, in_flight: Mapping[str, int]
) -> dict[str, int]:
    held = dict.fromkeys(devices, 0)
    for n in graph.nodes:
        held[placement[n.name]] += n.state_bytes
    for t in graph.tensors:
        for device in {placement[t.producer], *(placement[c] for c in t.consumers)}:
            held[device] += in_flight[placement[t.producer]] * _part_bytes(t, parts)
    return held


def _part_bytes(t: Tensor, parts: int) -> int:
    return -(-t.nbytes // parts) + -(-t.gradient_bytes // parts)


def _peaks(
    graph: Graph, devices: Mapping[str, Device], placement: Mapping[str, str], parts: int, spans: Sequence[Span]
) -> dict[str, int]:
    """Most bytes held at once: tensors from when they are begun until no backward pass needs them, gradients likewise."""
    when: dict[tuple[str, Pass, int, str], Span] = {}
    for s in spans:
        away = "" if isinstance(s.resource, str) else s.resource[s.direction == "forward"]
        when[s.what, s.direction, s.micro_batch, away] = s
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
    peaks: dict[str, int] = {}
    states = Counter[str]()
    for n in graph.nodes:
        states[placement[n.name]] += n.state_bytes
    for device, changes in steps.items():
        held = most = states[device]
        for _, change in sorted(changes):  # what ends at a moment makes room for what begins
            held += change
            most = max(most, held)
        peaks[device] = most
    return peaks
