"""Values that cross between stages, by name: NetSplit's transfer nodes (algorithm 2, section 4.5) as values.

NetSplit puts a node on each edge between two devices. Here a value is sent once to each stage that reads it, in one
message with all other values for that stage. A stage need not be next to its reader: a skip connection is sent directly. Results
of the model are sent to the last stage, which computes the loss. For every forward message there is one back, with the gradients
or empty. It signals that the micro-batch is done, so that no stage runs further ahead of its readers than the schedule allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ephemeron.errors import JobError
from ephemeron.partition.tracing.program import Ref, State, leaves
from ephemeron.partition.tracing.split import ModelSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBoundary:
    """Values that one stage receives and sends."""

    stage: int
    device: str
    given: tuple[str, ...]
    """Inputs of the model, and sizes computed from them."""
    received: Mapping[int, tuple[str, ...]]
    """Names by producing stage."""
    sent: Mapping[int, tuple[str, ...]]
    """Names by reading stage."""
    differentiable: frozenset[str]
    """Received values for which a gradient is sent back."""
    last: bool
    """Whether this stage computes the loss."""

    @property
    def fed(self) -> bool:
        """Whether it reads model inputs or targets."""
        return bool(self.given) or self.last


def stage_boundaries(split: ModelSplit) -> tuple[StageBoundary, ...]:
    """Boundaries of all stages.

    Raises:
        JobError: the model returns a parameter, which belongs to a device and is no value of a micro-batch; names it.
    """
    specs = [s.spec for s in split.stages]
    ports = {p.name: p for spec in specs for p in spec.outputs}
    maker = {p.name: spec.index for spec in specs for p in spec.outputs}
    last = len(specs) - 1
    reads: list[dict[str, None]] = [dict.fromkeys(p.name for p in spec.inputs) for spec in specs]
    for leaf in leaves(list(split.traced.program.outputs)):
        if isinstance(leaf, State):
            raise JobError(
                f"the model returns {leaf.name}, which is trained or changes on its device, as a result",
                remedy="return a value made of it, or read it from state_dict()",
            )
        if isinstance(leaf, Ref) and maker.get(leaf.name) != last:
            reads[last][leaf.name] = None
    made = []
    for i, spec in enumerate(specs):
        received: dict[int, list[str]] = {}
        for name in reads[i]:
            if name in maker:
                received.setdefault(maker[name], []).append(name)
        sent: dict[int, list[str]] = {}
        for j, names in enumerate(reads):
            for name in names:
                if j != i and maker.get(name) == i:
                    sent.setdefault(j, []).append(name)
        made.append(
            StageBoundary(
                stage=i,
                device=spec.device,
                given=tuple(n for n in reads[i] if n not in maker),
                received={s: tuple(n) for s, n in sorted(received.items())},
                sent={s: tuple(n) for s, n in sorted(sent.items())},
                differentiable=frozenset(n for n in reads[i] if n in maker and ports[n].needs_gradient),
                last=i == last,
            )
        )
    return tuple(made)


def results_of(split: ModelSplit) -> tuple[str, ...]:
    """Names of the values in the model's result."""
    found = (leaf for leaf in leaves(list(split.traced.program.outputs)) if isinstance(leaf, Ref))
    return tuple(dict.fromkeys(leaf.name for leaf in found))


def boundary_bytes(split: ModelSplit) -> dict[tuple[int, int], tuple[int, int]]:
    """Bytes of one example batch by (producing stage, reading stage): forward, and backward."""
    nbytes = {p.name: p.nbytes for s in split.stages for p in s.spec.outputs}
    return {
        (source, b.stage): (sum(nbytes[n] for n in names), sum(nbytes[n] for n in names if n in b.differentiable))
        for b in stage_boundaries(split)
        for source, names in b.received.items()
    }
