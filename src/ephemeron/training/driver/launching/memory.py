"""Estimate of a function's peak memory, from a trial of the model. `admission` has the lower bound.

A default quota is raised to the estimate. A quota that was chosen is kept, and the run has a note where it looks too small. The
peak is the sum of what is always allocated and the largest of the phases: activations of a training step, those of an evaluation
(in batches of 256), a checkpoint (arrays and their bytes), the loading of the initial state.

With its margin it was 7 to 11 % above the measured peaks of local functions for a linear model, a dense one of 40 MB and a
convolutional one, and some 40 % above for a dense one of 160 MB under Adam. An estimate that is too low would be harmful.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from ephemeron.data.batch_source import EVALUATION_BATCH
from ephemeron.training.collectives.kreduce import PREFETCHED
from ephemeron.training.collectives.sync_policy import policy_for
from ephemeron.training.job import AVERAGE, Configuration
from ephemeron.training.job.convergence import MOST_PROVISIONAL
from ephemeron.training.planner.model.direct_links import KEPT_VERSIONS
from ephemeron.units import MIB

BASE_MB = 250
"""Peak of a function that has imported PyTorch and trained a small model."""
STEP_MB = 64
OUTER_COPIES = {AVERAGE: 0, "SGD": 1}
"""Vectors in the state of an outer optimiser; others have 2. One more holds the parameters before local steps."""
_MARGIN = 1.1
_SAVED = 3
"""Copies of a checkpoint: arrays, their bytes one by one, and one object."""
_TRANSIENT = 4
"""Copies of the widest operator's inputs and outputs: its workspace, gradients, and those of the next operator."""
_BOTH_WAYS = 2
"""Copies of what the forward pass keeps: activations, and gradients and freed blocks in the backward pass."""


@dataclass(slots=True, kw_only=True)
class Activations:
    """Bytes per sample."""

    kept: float = 0.0
    """Kept for the backward pass."""
    widest: float = 0.0
    """Inputs and outputs of the largest module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryEstimate:
    """Parts of a function's peak, MiB."""

    base: float
    model: float
    """Parameters, buffers, gradients and the optimiser's state, also those of provisional steps."""
    exchange: float
    """Merged versions and contributions."""
    data: float
    largest: tuple[str, float]
    """The phase that needs most on top of the rest, and its MiB."""

    @property
    def total_mb(self) -> float:
        return self.base + self.model + self.exchange + self.data + self.largest[1]

    def __str__(self) -> str:
        name, more = self.largest
        return (
            f"{self.total_mb:.0f} MB (PyTorch {self.base:.0f}, model, gradients and optimizer {self.model:.0f}, exchange "
            f"{self.exchange:.0f}, samples {self.data:.0f}, {name} {more:.0f})"
        )


def estimate(
    c: Configuration,
    *,
    activations: Activations,
    state_bytes: int,
    vector_bytes: int,
    optimizer_copies: int,
    data_bytes: int,
    test_samples: int,
    stale: bool = True,
) -> MemoryEstimate:
    """Peak of the function that needs most.

    Args:
        c: resolved.
        activations: of the model.
        state_bytes: parameters and buffers.
        vector_bytes: S_m.
        optimizer_copies: vectors of that size in the optimiser's state.
        data_bytes: of its samples.
        test_samples: of its slice of the test set.
        stale: whether ranks with stale parameters step provisionally.
    """
    batch = max(c.batch_size, c.nonaggregator_batch_size)
    checkpoint = state_bytes + optimizer_copies * vector_bytes
    evaluated = min(EVALUATION_BATCH, test_samples)
    phases = {
        "a training step": batch * (_BOTH_WAYS * activations.kept + _TRANSIENT * activations.widest),
        "an evaluation": evaluated * _TRANSIENT * activations.widest,
        "a checkpoint": _SAVED * checkpoint,
        "loading": 2 * state_bytes,
    }
    largest = max(phases, key=lambda name: phases[name])
    lacks = min(policy_for(c.sync).other_staleness, MOST_PROVISIONAL) if stale and c.workers > 1 else 0
    provisional = lacks + 1 + optimizer_copies if lacks else 0  # own gradients; copies of parameters and optimiser
    local = 1 + OUTER_COPIES.get(c.exchange.outer_optimizer.target, 2) if c.exchanged == "deltas" else 0
    shard = vector_bytes / max(1, c.aggregators)
    gathered = 0 if c.workers == 1 else min(PREFETCHED, c.workers - 1) + 2
    return MemoryEstimate(
        base=BASE_MB,
        model=(state_bytes + vector_bytes * (1 + optimizer_copies + provisional + local)) / MIB,
        # Merged versions as they came, put together and applied; what is sent in its frame.
        exchange=(vector_bytes * (max(4, 1 + _kept(c)) if c.workers > 1 else 1) + shard * gathered) / MIB,
        data=data_bytes / MIB,
        largest=(largest, phases[largest] / MIB),
    )


def _kept(c: Configuration) -> int:
    """Vectors that a member of a direct channel keeps for the others: contributions, and versions until they are durable."""
    if not c.direct or c.group == 1 or not policy_for(c.sync).deterministic:
        return 0
    repeated = 0 if c.sync == "bsp" and c.stages.count == 1 and not c.regions.region else 2 * c.checkpoint_every
    return 2 * KEPT_VERSIONS + repeated


def quota_for(found: MemoryEstimate, c: Configuration, *, most_mb: int) -> tuple[int, str]:
    """The quota to run with, and a remark on it, which may be empty."""
    needed = math.ceil(found.total_mb * _MARGIN / STEP_MB) * STEP_MB
    if found.total_mb <= c.memory_mb:
        return c.memory_mb, ""
    if c.memory_is_default and needed <= most_mb:
        return (needed, f"memory is {needed} MB instead of {c.memory_mb} MB, because a function is estimated to need {found}")
    return c.memory_mb, f"a function is estimated to need {found}, its quota is {c.memory_mb} MB"


@contextmanager
def measured(model: Any, samples: int, into: Activations) -> Iterator[None]:
    """Measures what a training step over so many samples keeps for its backward pass, and the widest module."""
    import torch

    own = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    kept: dict[int, int] = {}

    def keep(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return t

    def wide(module: Any, args: Any, output: Any) -> None:
        if torch.compiler.is_compiling():  # a model that the program has compiled: sizes are symbols here
            return
        nbytes = sum(t.nbytes for t in (*_tensors(args), *_tensors(output)))
        into.widest = max(into.widest, nbytes / samples)

    # Scripted modules need not take hooks of Python.
    watched = [m for m in model.modules() if not list(m.children()) and not isinstance(m, torch.jit.ScriptModule)]
    handles = [m.register_forward_hook(wide) for m in watched]
    try:
        with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
            yield
    finally:
        for handle in handles:
            handle.remove()
        into.kept = sum(kept.values()) / samples


def _tensors(value: Any) -> Iterator[Any]:
    import torch

    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for inner in value.values():
            yield from _tensors(inner)
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _tensors(inner)
