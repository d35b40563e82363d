"""Operators, the nodes that are placed, made of steps; and groups of operators that have to be on one device.

Steps without cost that would only add edges are joined to others: elements of a tuple, views (they share memory with their base), sizes,
counters. A group has the operators that must stay on one device: those that change memory in place together with its producers and earlier
readers, and those that share a changing buffer, an opaque module or, optionally, a parameter.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from ephemeron.partition.tracing.program import Ref, State, TracedStep, leaves, reads
from ephemeron.partition.tracing.side_effects import Observation, references, states_of_module
from ephemeron.partition.tracing.traced import Traced

Ties = Literal["together", "apart"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """A node of the operator graph."""

    name: str
    steps: tuple[TracedStep, ...]
    """Steps in order; none: an input of the model."""
    inputs: tuple[str, ...]
    """Tensors of other operators that it reads."""
    outputs: tuple[str, ...]
    """Its tensors that others read, and outputs of the model."""
    states: tuple[str, ...]
    """Parameters and buffers that it reads."""
    group: str | None = None


def operators(traced: Traced, *, ties: Ties = "together") -> tuple[Operator, ...]:
    """Operators of a traced model, each after its inputs.

    Args:
        traced: the model.
        ties: whether operators that share a parameter stay together; apart, each device has a copy and gradients are summed.
    """
    home = _homes(traced)
    members: dict[str, list[TracedStep]] = {i.name: [] for i in traced.program.inputs}
    for step in traced.program.steps:
        members.setdefault(home[step.name], []).append(step)
    groups = _groups(traced, home, ties)
    values = traced.observation.values
    readers: dict[str, set[str]] = {}
    for step in traced.program.steps:
        for name in references(step):
            readers.setdefault(name, set()).add(home[step.name])
    wanted = {r.name for r in leaves(list(traced.program.outputs)) if isinstance(r, Ref)}
    made = []
    for name, steps in members.items():
        own = [name, *(s.name for s in steps)] if name in values and not steps else [s.name for s in steps]
        if any(i.name == name for i in traced.program.inputs):
            own = list(dict.fromkeys([name, *own]))
        read = dict.fromkeys(n for s in steps for n in references(s) if home[n] != name and values[n].kind == "tensor")
        out = [n for n in own if values[n].kind == "tensor" and (n in wanted or readers.get(n, set()) - {name})]
        made.append(
            Operator(
                name=name,
                steps=tuple(steps),
                inputs=tuple(read),
                outputs=tuple(out),
                states=tuple(dict.fromkeys(n for s in steps for n in states_read(traced, s))),
                group=groups.get(name),
            )
        )
    return _ordered(made, home)


def states_read(traced: Traced, step: TracedStep) -> tuple[str, ...]:
    """Canonical names of parameters and buffers that a step or its opaque module reads."""
    found = [r.name for r in reads(step) if isinstance(r, State)]
    if step.module is not None:
        names: Mapping[str, str] = traced.__dict__["names"]
        found += [names.get(n, n) for n in states_of_module(traced.module_at(step.module), step.module)]
    return tuple(dict.fromkeys(found))


def front_numbers(traced: Traced) -> tuple[TracedStep, ...]:
    """Steps that compute sizes from the model's inputs only; every stage can have them before anything runs."""
    values = traced.observation.values
    free = {i.name for i in traced.program.inputs}
    made = []
    for step in traced.program.steps:
        if values[step.name].kind == "number" and not states_read(traced, step) and set(references(step)) <= free:
            free.add(step.name)
            made.append(step)
    return tuple(made)


def last_writers(traced: Traced, found: Sequence[Operator]) -> dict[int, tuple[int, str]]:
    """Last writer of each storage that is changed in place: number of the step, and its operator."""
    home = {s.name: o.name for o in found for s in o.steps}
    made = {}
    for i, step in enumerate(traced.program.steps):
        for storage in traced.observation.side_effects[step.name].changed:
            made[storage] = (i, home[step.name])
    return made


def _homes(traced: Traced) -> dict[str, str]:
    """Operator by value."""
    program, seen = traced.program, traced.observation
    home = {i.name: i.name for i in program.inputs}
    front = {s.name for s in front_numbers(traced)}
    dangling: list[TracedStep] = []
    used = {r.name for s in program.steps for r in reads(s) if isinstance(r, Ref)}
    used |= {r.name for r in leaves(list(program.outputs)) if isinstance(r, Ref)}
    for step in program.steps:
        from_others = [n for n in references(step) if n not in front]
        tensors = {home[n] for n in from_others}
        if step.name in front:
            home[step.name] = home[next(iter(references(step)), step.name)] if references(step) else step.name
        elif step.name not in used and not from_others:
            dangling.append(step)
        elif len(tensors) == 1 and not states_read(traced, step) and _is_free(step, seen, from_others):
            home[step.name] = tensors.pop()
        else:
            home[step.name] = step.name
            for d in dangling:
                home[d.name] = step.name
            dangling.clear()
    last = next((home[s.name] for s in reversed(program.steps) if s.name in home), None)
    for d in dangling:
        home[d.name] = last or d.name
    return home


def _is_free(step: TracedStep, seen: Observation, read: Sequence[str]) -> bool:
    """Whether a step only indexes or views the result of another step."""
    value, effect = seen.values[step.name], seen.side_effects[step.name]
    if effect.changed or effect.changed_states or step.opaque:
        return False
    if any(seen.values[n].kind == "other" for n in read):
        return getattr(step.target, "__name__", "") == "getitem"
    return value.kind == "number" or (value.kind == "tensor" and any(seen.values[n].storage == value.storage for n in read))


def _groups(traced: Traced, home: Mapping[str, str], ties: Ties) -> dict[str, str]:
    program, seen = traced.program, traced.observation
    together: dict[object, list[str]] = {}
    last_change: dict[int, int] = {}
    for i, step in enumerate(program.steps):
        for storage in seen.side_effects[step.name].changed:
            last_change[storage] = i
    changed_states = {n for d in seen.side_effects.values() for n in d.changed_states}
    parameters = {n for n, _ in traced.named_parameters()}
    numbers = {s.name for s in front_numbers(traced)}
    for i, step in enumerate(program.steps):
        touched = {seen.values[n].storage for n in (*references(step), step.name) if seen.values[n].kind == "tensor"}
        for storage in touched:
            if i <= last_change.get(storage, -1):
                together.setdefault(("memory", storage), []).append(step.name)
        for name in states_read(traced, step):
            if name in changed_states or (name in parameters and ties == "together"):
                together.setdefault(("state", name), []).append(step.name)
        if step.module is not None:
            together.setdefault(("module", step.module), []).append(step.name)
        for name in references(step):
            if seen.values[name].kind != "tensor" and name not in numbers:
                together.setdefault(("value", name), []).extend((name, step.name))
    for given in program.inputs:
        storage = seen.values[given.name].storage
        if ("memory", storage) in together:
            together["memory", storage].append(given.name)
    return _united([[home[n] for n in names] for names in together.values()])


def _united(sets: Iterable[Sequence[str]]) -> dict[str, str]:
    """Name of the group (that of its first member) by member; overlapping sets are one group."""
    parent: dict[str, str] = {}

    def root(n: str) -> str:
        while parent.setdefault(n, n) != n:
            n = parent[n]
        return n

    for names in sets:
        for n in names:
            parent[root(n)] = root(names[0])
    sizes: dict[str, int] = {}
    for n in parent:
        sizes[root(n)] = sizes.get(root(n), 0) + 1
    return {n: root(n) for n in parent if sizes[root(n)] > 1}


def _ordered(made: Sequence[Operator], home: Mapping[str, str]) -> tuple[Operator, ...]:
    """Operators, each after its inputs; joining views may have changed the order."""
    by_name = {o.name: o for o in made}
    done: dict[str, None] = {}

    def visit(start: str) -> None:
        stack = [(start, iter([home[n] for n in by_name[start].inputs]))]
        while stack:
            name, rest = stack[-1]
            following = next((n for n in rest if n not in done and n != name), None)
            if following is None:
                done[name] = None
                stack.pop()
            else:
                stack.append((following, iter([home[n] for n in by_name[following].inputs])))

    for o in made:
        if o.name not in done:
            visit(o.name)
    return tuple(by_name[name] for name in done)
