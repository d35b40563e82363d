"""Stages of a placement, as names of operators. Pure.

If tensors never return to a device, directly or through others, each device has one stage: a pipeline. Otherwise a device has several, each
as large as possible: operators whose inputs come through another device are in a later stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ephemeron.errors import JobError
from ephemeron.partition.tracing.operators import Operator


def stages_of(
    operators: Sequence[Operator], placement: Mapping[str, str], devices: Sequence[str] = ()
) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Device and operators of each stage, in topological order.

    Args:
        operators: each after its inputs.
        placement: device by operator.
        devices: of a pipeline, in its order; empty: the first order that is found.

    Raises:
        JobError: an operator without a device, an unknown one, a group on several devices, a group that other devices
            would have to interrupt, or devices in an order that sends a tensor backwards; named.
    """
    _check(operators, placement)
    maker = {n: o.name for o in operators for n in o.outputs}
    before = {o.name: {maker[n] for n in o.inputs} for o in operators}
    order = _device_order(operators, before, placement, devices)
    if order is not None:
        return tuple((d, tuple(o.name for o in operators if placement[o.name] == d)) for d in order)
    level = _levels(operators, before, placement)
    keys = sorted({(level[o.name], placement[o.name]) for o in operators})
    return tuple((d, tuple(o.name for o in operators if (level[o.name], placement[o.name]) == (k, d))) for k, d in keys)


def _check(operators: Sequence[Operator], placement: Mapping[str, str]) -> None:
    known = {o.name for o in operators}
    for name in placement:
        if name not in known:
            raise JobError(f"placement has {name}, which is no operator of the model", remedy="place the graph of this model")
    at: dict[str, tuple[str, str]] = {}
    for o in operators:
        if o.name not in placement:
            raise JobError(f"placement has no device for operator {o.name}", remedy="place every operator")
        if o.group is not None:
            first, device = at.setdefault(o.group, (o.name, placement[o.name]))
            if device != placement[o.name]:
                raise JobError(
                    f"placement puts {first} on {device} and {o.name} on {placement[o.name]}, and they share state that changes",
                    remedy="put nodes of one group on one device",
                )


def _device_order(
    operators: Sequence[Operator], before: Mapping[str, set[str]], placement: Mapping[str, str], given: Sequence[str]
) -> list[str] | None:
    """Devices, each after those that send to it; None if there is a cycle."""
    waits: dict[str, set[str]] = {placement[o.name]: set() for o in operators}
    for o in operators:
        waits[placement[o.name]] |= {placement[b] for b in before[o.name]} - {placement[o.name]}
    if given:
        wrong = sorted(set(given) ^ set(waits)) + [d for k, d in enumerate(given) if d in waits and not waits[d] <= set(given[:k])]
        if wrong or len(given) != len(waits):
            raise JobError(
                f"stages = {', '.join(given)} is no order of the placement's devices in which tensors only go forward",
                remedy="take stages and placement of one plan",
            )
        return list(given)
    order: list[str] = []
    while len(order) < len(waits):
        free = next((d for d in waits if d not in order and waits[d] <= set(order)), None)
        if free is None:
            return None
        order.append(free)
    return order


def _levels(operators: Sequence[Operator], before: Mapping[str, set[str]], placement: Mapping[str, str]) -> dict[str, int]:
    """Most changes of device on a path to each operator; equal within a group."""
    level = {o.name: 0 for o in operators}
    groups: dict[str, list[str]] = {}
    for o in operators:
        if o.group is not None:
            groups.setdefault(o.group, []).append(o.name)
    for _ in range(len(operators) + 1):
        changed = False
        for o in operators:
            least = max((level[b] + (placement[b] != placement[o.name]) for b in before[o.name]), default=0)
            if level[o.name] < least:
                level[o.name], changed = least, True
        for names in groups.values():
            top = max(level[n] for n in names)
            changed |= any(level[n] < top for n in names)
            level.update(dict.fromkeys(names, top))
        if not changed:
            return level
    worst = max(groups, key=lambda g: level[groups[g][0]])
    raise JobError(
        f"placement sends outputs of {', '.join(groups[worst][:4])} to another device and back to the same group, which cannot be divided",
        remedy="place the operators between them on the same device",
    )
