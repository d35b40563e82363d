"""Checks of a placement, and the tasks of one micro-batch with their dependencies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from ephemeron.errors import JobError
from ephemeron.partition.graph.graph import Graph
from ephemeron.partition.graph.topology import Device, Topology
from ephemeron.partition.schedule_simulator.schedule import Pass, Schedule, Task

Resource: TypeAlias = str | tuple[str, str]
"""A device, or a link as (source, target)."""


def check_placement(graph: Graph, devices: Mapping[str, Device], placement: Mapping[str, str]) -> None:
    """Check that every node is on a device whose kind it has times for, and every group on one device.

    Raises:
        JobError: a node or group is not; names it.
    """
    home: dict[str, tuple[str, str]] = {}
    for n in graph.nodes:
        at = placement.get(n.name)
        if at is None:
            raise JobError(f"placement: node {n.name} is on no device", remedy="place every node")
        if at not in devices:
            raise JobError(f"placement: node {n.name} is on {at}, which is no device", remedy=f"use {', '.join(devices)}")
        if devices[at].kind not in n.forward_s:
            raise JobError(
                f"device {at} is of the kind {devices[at].kind}, for which node {n.name} has no times",
                remedy=f"measure it, or use one of {', '.join(sorted(n.forward_s))}",
            )
        if n.group is not None:
            first, place = home.setdefault(n.group, (n.name, at))
            if place != at:
                raise JobError(
                    f"placement: group {n.group} is on several devices: {first} is on {place}, {n.name} on {at}",
                    remedy="place a group's nodes on one device",
                )


@dataclass(slots=True)
class TaskTemplate:
    """One task of one micro-batch, as a template for all."""

    resource: Resource
    task: Task
    at: str
    """Reading device of a transfer, which tells transfers of one tensor apart; empty for nodes."""
    seconds: float
    after: list[int] = field(default_factory=list)
    waits: int = 0
    rank_s: float = 0.0
    """Longest path to the end, this task included."""


def tasks_of(graph: Graph, topology: Topology, placement: Mapping[str, str], schedule: Schedule) -> list[TaskTemplate]:
    """All tasks of one micro-batch with their dependencies."""
    parts = schedule.micro_batches
    devices = {d.name: d for d in topology.devices}
    links = {(k.source, k.target): k for k in topology.links}
    jobs: list[TaskTemplate] = []
    number: dict[tuple[str, Pass, str], int] = {}

    def add(resource: Resource, what: str, direction: Pass, seconds: float, at: str = "") -> None:
        number[what, direction, at] = len(jobs)
        jobs.append(TaskTemplate(resource=resource, task=(what, direction), at=at, seconds=seconds))

    def order(first: tuple[str, Pass, str], then: tuple[str, Pass, str]) -> None:
        jobs[number[first]].after.append(number[then])
        jobs[number[then]].waits += 1

    for n in graph.nodes:
        device = devices[placement[n.name]]
        forward_s, backward_s = n.forward_s[device.kind], n.backward_s[device.kind]
        again_s = forward_s if schedule.recompute else 0.0
        add(device.name, n.name, "forward", forward_s / device.speed / parts)
        add(device.name, n.name, "backward", (backward_s + again_s) / device.speed / parts)
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
            # a tensor may have the name of a node: `at` distinguishes them
            add((home, away), t.name, "forward", links[home, away].seconds(t.nbytes / parts), away)
            order((t.producer, "forward", ""), (t.name, "forward", away))
            if t.gradient_bytes:
                add((away, home), t.name, "backward", links[away, home].seconds(t.gradient_bytes / parts), away)
                order((t.name, "backward", away), (t.producer, "backward", ""))
            returned: tuple[str, Pass, str] = (t.producer, "backward", "")
            if t.gradient_bytes:
                returned = (t.name, "backward", away)
            for c in readers:
                order((t.name, "forward", away), (c, "forward", ""))
                order((c, "backward", ""), returned)
    _rank(jobs)
    return jobs


def _rank(jobs: list[TaskTemplate]) -> None:
    waits = [job.waits for job in jobs]
    free = [i for i, w in enumerate(waits) if w == 0]
    for i in free:  # grows as it is read
        for j in jobs[i].after:
            waits[j] -= 1
            if waits[j] == 0:
                free.append(j)
    for i in reversed(free):
        jobs[i].rank_s = jobs[i].seconds + max((jobs[j].rank_s for j in jobs[i].after), default=0.0)
