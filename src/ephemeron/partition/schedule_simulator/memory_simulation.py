"""Memory of a simulated schedule; shares no code with the solvers.

Memory is reported twice. `reserved_for` is equation 5-18 for every micro-batch that may be in flight, and decides whether a placement
fits. `peaks` is the maximum over time, with each tensor from the start of its producer to the end of the last backward pass that
needs it; it is never more. With `recompute`, tensors inside a stage count once. Tensors that cross a stage boundary, inputs of the
model included, count for every micro-batch in flight: outputs may wait for a slow link, and gradients may arrive early.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from ephemeron.partition.graph.graph import Graph, Tensor
from ephemeron.partition.graph.topology import Device
from ephemeron.partition.schedule_simulator.replay import ReplaySpan
from ephemeron.partition.schedule_simulator.schedule import Pass, Schedule


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
