"""What crosses between stages, by name: NetSplit's transfer nodes (algorithm 2, section 4.5) as values.

NetSplit puts a node on each edge between two devices. Here a value goes once to each stage that reads it, in one
message with everything else that goes there, and a stage need not be next to its reader: a skip connection goes
straight. Results of the model go to the last stage, where the loss is. For every message forwards there is one back,
with the gradients or empty: it says that the micro-batch is through, so that no stage runs ahead of its readers further
than the schedule allows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ephemeron.errors import JobError
from ephemeron.partition.tracing.program import Ref, State, leaves
from ephemeron.partition.tracing.split import ModelSplit


@dataclass(frozen=True, slots=True, kw_only=True)
class StageBoundary:
    """One stage's."""

    stage: int
    device: str
    given: tuple[str, ...]
    """Inputs of the model, and sizes that follow from them."""
    received: Mapping[int, tuple[str, ...]]
    """Names by stage that makes them."""
    sent: Mapping[int, tuple[str, ...]]
    """Names by stage that reads them."""
    differentiable: frozenset[str]
    """Of those received: a gradient goes back."""
    last: bool
    """Whether the loss is here."""

    @property
    def fed(self) -> bool:
        """Whether it is given anything from outside: inputs, or what the loss compares with."""
        return bool(self.given) or self.last


def borders(split: ModelSplit) -> tuple[StageBoundary, ...]:
    """Of all stages.

    Raises:
        JobError: the model returns a parameter itself, which lies on some device and is no value of a micro-batch;
            names it.
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
    """Names of the values that the model returns."""
    found = (leaf for leaf in leaves(list(split.traced.program.outputs)) if isinstance(leaf, Ref))
    return tuple(dict.fromkeys(leaf.name for leaf in found))


def border_bytes(split: ModelSplit) -> dict[tuple[int, int], tuple[int, int]]:
    """Bytes of one example batch by (maker, reader): forwards, and back."""
    nbytes = {p.name: p.nbytes for s in split.stages for p in s.spec.outputs}
    return {
        (source, b.stage): (sum(nbytes[n] for n in names), sum(nbytes[n] for n in names if n in b.differentiable))
        for b in borders(split)
        for source, names in b.received.items()
    }
