"""Bytes of optimiser state per parameter, measured after one step on a copy of the parameters.

NetSplit (section 4.3) takes a whole multiple α of the parameters by the optimiser's name: 4 for Adam, gradient included. A measurement
is also right for factored states (Adafactor), momenta in another dtype, frozen parameters and user-defined optimisers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ephemeron.errors import JobError
from ephemeron.user_code import line_of

MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def optimizer_bytes(model: nn.Module, make: MakeOptimizer) -> dict[str, int]:
    """Bytes of optimiser state after one step.

    Args:
        model: its trained parameters count; it does not change.
        make: makes the optimiser over given parameters.

    Returns:
        Bytes by name of the parameter, for all with `requires_grad`.

    Raises:
        JobError: the optimiser's step fails, e.g. because it needs a closure or sparse gradients.
    """
    trained = {n: copy.deepcopy(p.detach()).requires_grad_() for n, p in model.named_parameters() if p.requires_grad}
    if not trained:
        return {}
    parameters = {n: nn.Parameter(p) for n, p in trained.items()}
    for p in parameters.values():
        p.grad = torch.full_like(p, 1e-3)
    try:
        optimizer = make(parameters.values())
        optimizer.step()
    except Exception as e:
        raise JobError(
            f"the optimiser cannot make one step with dense gradients: {line_of(e)[:200]}", remedy="give bytes by parameter yourself"
        ) from e
    return {n: _nbytes(optimizer.state.get(p, {})) for n, p in parameters.items()}


def alpha(model: nn.Module, state_bytes: dict[str, int]) -> float:
    """NetSplit's α: (parameters + gradients + optimiser state) / parameters, over trained parameters."""
    own = sum(p.numel() * p.element_size() for n, p in model.named_parameters() if n in state_bytes)
    return (2 * own + sum(state_bytes.values())) / own if own else 1.0


def _nbytes(state: Any) -> int:
    return sum(t.numel() * t.element_size() for t in tree_leaves(dict(state)) if isinstance(t, torch.Tensor))
