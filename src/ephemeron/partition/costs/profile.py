"""Graph and costs of a real model in one call, as input of `place` (NetSplit, sections 4.1 to 4.4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ephemeron.partition.costs.optimizer import MakeOptimizer, alpha, optimizer_bytes
from ephemeron.partition.costs.times import Times, measure_times
from ephemeron.partition.graph.graph import Graph
from ephemeron.partition.tracing.check import Loss
from ephemeron.partition.tracing.graph_builder import graph_of
from ephemeron.partition.tracing.operators import Ties
from ephemeron.partition.tracing.traced import Traced


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelProfile:
    """A measured model."""

    traced: Traced
    graph: Graph
    times: Times
    alpha: float
    """(parameters + gradients + optimiser state) / parameters."""


def profile_model(
    traced: Traced,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    *,
    optimizer: MakeOptimizer,
    kind: str | None = None,
    name: str = "model",
    loss: Loss | None = None,
    repeats: int = 9,
    ties: Ties = "together",
) -> ModelProfile:
    """Times, optimiser state and graph of a model, measured.

    Args:
        traced: on the device to be measured.
        args, kwargs: a batch there.
        optimizer: over given parameters.
        kind: name of this kind of device; by default its type, `cpu` or `cuda`.
        name: of the graph.
        loss: of the result.
        repeats: number of measured passes.
        ties: see `operators`.

    Raises:
        JobError: the optimiser cannot be measured, or too few repetitions.
    """
    state = optimizer_bytes(traced, optimizer)
    times = measure_times(traced, args, kwargs, loss=loss, repeats=repeats)
    label = kind or times.device
    graph = graph_of(
        traced,
        name=name,
        forward_s={n: {label: t.median_s} for n, t in times.forward.items()},
        backward_s={n: {label: t.median_s} for n, t in times.backward.items()},
        optimizer_bytes=state,
        ties=ties,
        source=f"measured on {label}: medians of {times.repeats}, parts/whole = {times.ratio:.2f}",
    )
    nodes = tuple(
        replace(n, passes_s={label: tuple(p[n.name] for p in times.passes)}) if n.name in times.forward else n for n in graph.nodes
    )
    return ModelProfile(traced=traced, graph=replace(graph, nodes=nodes), times=times, alpha=alpha(traced, state))
