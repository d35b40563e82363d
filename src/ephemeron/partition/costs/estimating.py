"""Estimated time of operators from their operations and bytes: the same numbers on every machine and at every launch.

MeasuredTopology times (`times`) are more accurate, but differ from run to run. The cut of a model must not: otherwise two launches of one
job would not give the same bits. So PyTorch's counter counts operations while the example batch runs, bytes are the sizes of the
tensors read and written, and a roofline of one vCPU gives seconds.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from ephemeron.partition.tracing.operators import operators
from ephemeron.partition.tracing.traced import Traced

FLOP_S, BYTES_S = 2e10, 5e9
"""Rates of one vCPU: about a third of the peak of AVX2, and its share of the memory bandwidth. Only their ratio to each other and to
the network's bandwidth affects the cut of a model."""
BACKWARD = 2.0
"""Time of a backward pass, in forward passes."""


def estimated_s(traced: Traced, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> dict[str, float]:
    """Seconds of each operator's forward pass over an example batch, on one vCPU."""
    clone = copy.deepcopy(traced)
    seconds: dict[str, float] = {}
    plain = clone.call_step

    def seen(step: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
        with FlopCounterMode(display=False) as counter:
            made = plain(step, args, kwargs)
        touched = sum(t.nbytes for t in tree_leaves((args, kwargs, made)) if isinstance(t, torch.Tensor))
        seconds[step.name] = counter.get_total_flops() / FLOP_S + touched / BYTES_S
        return made

    clone.__dict__["call_step"] = seen
    with torch.random.fork_rng(), torch.no_grad():
        clone.run_steps(clone.named_inputs(tuple(args), dict(kwargs or {})))
    return {o.name: sum(seconds[s.name] for s in o.steps) for o in operators(traced, ties="apart")}
