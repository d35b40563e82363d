"""What operators take, estimated from what they do: the same numbers on every machine and at every launch.

Measured times (`times`) are truer and differ from run to run; where a model is cut must not, or two launches of one job
would not give the same bits. So operations are counted by PyTorch's own counter while the example batch runs, and bytes
by the sizes of what is read and made; a roofline of one vCPU turns both into seconds.
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
"""Of one vCPU: about a third of what AVX2 could do, and its share of the memory's bandwidth. Only their ratio matters
to where a model is cut, and theirs to the network's."""
BACKWARD = 2.0
"""Times the forward pass."""


def estimated_s(traced: Traced, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None) -> dict[str, float]:
    """Seconds of each operator's forward pass over an example batch, on one vCPU."""
    twin = copy.deepcopy(traced)
    seconds: dict[str, float] = {}
    plain = twin.call_step

    def seen(step: Any, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
        with FlopCounterMode(display=False) as counter:
            made = plain(step, args, kwargs)
        touched = sum(t.nbytes for t in tree_leaves((args, kwargs, made)) if isinstance(t, torch.Tensor))
        seconds[step.name] = counter.get_total_flops() / FLOP_S + touched / BYTES_S
        return made

    twin.__dict__["call_step"] = seen
    with torch.random.fork_rng(), torch.no_grad():
        twin.run_steps(twin.named_inputs(tuple(args), dict(kwargs or {})))
    return {o.name: sum(seconds[s.name] for s in o.steps) for o in operators(traced, ties="apart")}
