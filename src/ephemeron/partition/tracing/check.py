"""Comparison of a traced model with the original by some training steps of both.

Tracers can be wrong without an error. So outputs, loss, gradients, parameters and buffers are compared after each step, from the same
random state; then once with a smaller last batch, and in evaluation. Differences are reported with the suspect operators: the operators
that read the parameter whose gradient is wrong, or the first module whose result no step reproduces.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map

from ephemeron.errors import JobError, TraceMismatch
from ephemeron.partition.tracing.exporting import canonical_names, with_less
from ephemeron.partition.tracing.program import State, reads
from ephemeron.partition.tracing.traced import Traced
from ephemeron.user_code import line_of

Loss = Callable[[Any], torch.Tensor]
"""Loss of the model's result, one number."""
_TOLERANCE = {
    torch.float64: 1e-10,
    torch.float32: 1e-6,
    torch.bfloat16: 1e-2,
    torch.float16: 1e-2,
    torch.complex128: 1e-10,
    torch.complex64: 1e-6,
    torch.complex32: 1e-2,
}
_COARSE = 0.1
"""Tolerance of floating types of eight bits."""
_RATE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class TracingCheck:
    """Result of the comparison."""

    steps: int
    largest_difference: float
    """Largest difference of any value, relative to the largest value of its tensor (at least 1)."""
    smaller_batch: bool
    """Whether a batch without its last sample was compared, too; the original may not accept one."""
    evaluation: bool
    """Whether evaluation is equal."""


def check(
    original: nn.Module, traced: Traced, args: tuple[Any, ...], kwargs: dict[str, object], *, loss: Loss | None = None, steps: int = 3
) -> TracingCheck:
    """Comparison of two models, whose states do not change. The tolerance of float64 is 1e-10, of float32 1e-6.

    Args:
        original: in training mode.
        traced: of the same model.
        args, kwargs: an example batch.
        loss: of the result; by default the mean square of every floating or complex result, summed.
        steps: number of SGD steps.

    Raises:
        TraceMismatch: the models differ; names value, step, difference and operator.
    """
    loss = loss or mean_square
    left, right = copy.deepcopy(original), copy.deepcopy(traced)
    left.train()
    right.train()
    worst = 0.0
    for step in range(steps):
        a, b = one_step(left, args, kwargs, loss, step), _traced_step(right, args, kwargs, loss, step)
        worst = max(worst, _compare(a, b, f"step {step + 1} of training", original, traced, args, kwargs))
        _apply(left)
        _apply(right)
        worst = max(worst, _compare(_states(left), _states(right), f"step {step + 1} of training", original, traced, args, kwargs))
    smaller = _smaller(left, right, args, kwargs, loss, original, traced)
    return TracingCheck(steps=steps, largest_difference=worst, smaller_batch=smaller, evaluation=_evaluates(left, right, args, kwargs))


def mean_square(result: Any) -> torch.Tensor:
    """Sum of the mean squares of all floating tensors of a result; complex tensors count as real and imaginary parts."""
    found = [t for t in tree_leaves(result) if isinstance(t, torch.Tensor)]
    parts = [_real(t).double().square().mean() for t in found if t.is_floating_point() or t.is_complex()]
    if not parts:
        raise JobError("the model returns no floating tensor, so there is nothing to train", remedy="give a loss")
    return torch.stack(parts).sum()


def _real(t: torch.Tensor) -> torch.Tensor:
    """Tensor with complex numbers as pairs of real ones."""
    return torch.view_as_real(t.resolve_conj()) if t.is_complex() else t


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference, relative to the largest value (at least 1); infinite if shapes or dtypes differ."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return float("inf")
    if a.numel() == 0 or torch.equal(a, b):
        return 0.0
    x, y = _real(a.detach()).double(), _real(b.detach()).double()
    gap = (x - y).abs()
    gap = torch.where(torch.isnan(x) & torch.isnan(y) | (x == y), torch.zeros_like(gap), gap)
    scale = max(1.0, float(x.abs().nan_to_num(0, 0, 0).max()))
    return float(gap.max().nan_to_num(float("inf"))) / scale


def tolerance(dtype: torch.dtype) -> float:
    """Largest `difference` that counts as rounding; integers and booleans have to be equal."""
    return _TOLERANCE.get(dtype, _COARSE if dtype.is_floating_point else 0.0)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Context with seeded generators of PyTorch and Python, whose states are restored."""
    state = random.getstate()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        random.seed(seed)
        try:
            yield
        finally:
            random.setstate(state)


def fresh(tree: Any) -> Any:
    """Copies of all tensors, detached from autograd's graph."""
    return tree_map(lambda t: t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, torch.Tensor) else t, tree)


def one_step(model: nn.Module, args: Any, kwargs: Any, loss: Loss, seed: int) -> dict[str, torch.Tensor]:
    """Outputs, loss and gradients of one forward and backward pass, by their names in messages."""
    model.zero_grad(set_to_none=True)
    args, kwargs = fresh((args, kwargs))
    with seeded(seed):
        result = model(*args, **kwargs)
        value = loss(result)
        if value.requires_grad:
            torch.autograd.backward([value])
    found = {f"output {i}": t for i, t in enumerate(tree_leaves(result)) if isinstance(t, torch.Tensor)}
    found["loss"] = value
    given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.requires_grad]
    found |= {f"gradient of input {i}": t.grad for i, t in enumerate(given) if t.grad is not None}
    return found | {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}


def _traced_step(model: Traced, args: Any, kwargs: Any, loss: Loss, seed: int) -> dict[str, torch.Tensor]:
    try:
        return one_step(model, args, kwargs, loss, seed)
    except Exception as e:
        raise TraceMismatch(f"only the traced model fails: {line_of(e)[:300]}") from e


def _states(model: nn.Module) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {f"parameter {n}": p for n, p in model.named_parameters()}
    return found | {f"buffer {n}": b for n, b in model.named_buffers()}


def _apply(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None and p.requires_grad:
                p.add_(p.grad, alpha=-_RATE)


def _compare(
    a: dict[str, torch.Tensor], b: dict[str, torch.Tensor], where: str, original: nn.Module, traced: Traced, args: Any, kwargs: Any
) -> float:
    worst = 0.0
    for name in (*a, *(n for n in b if n not in a)):
        if name not in a or name not in b:
            gap = float("inf")
            what = f"{name} is there only in the {'traced' if name in b else 'original'} model"
        else:
            gap = difference(a[name], b[name])
            what = f"{name} differs by {gap:.2g}"
            worst = max(worst, gap)
        if gap > tolerance((a[name] if name in a else b[name]).dtype):
            raise TraceMismatch(
                f"{where}: {what}, tracer {traced.program.tracer}, at {_suspect_operators(name, original, traced, args, kwargs)}"
            )
    return worst


def _suspect_operators(name: str, original: nn.Module, traced: Traced, args: Any, kwargs: Any) -> str:
    state = name.partition(" of ")[2] if name.startswith("gradient of") else name.partition(" ")[2]
    readers = [s.operator for s in traced.program.steps if State(state) in reads(s)]
    if readers:
        return "operator " + ", ".join(readers)
    return _first_wrong_module(original, traced, args, kwargs)


def _first_wrong_module(original: nn.Module, traced: Traced, args: Any, kwargs: Any) -> str:
    """The first innermost module whose result is none of the traced values."""
    seen: list[tuple[str, torch.Tensor]] = []
    clone, other = copy.deepcopy(original), copy.deepcopy(traced)
    for path, module in clone.named_modules():
        if not any(module.children()):

            def note(_: nn.Module, __: Any, made: Any, path: str = path) -> None:
                seen.extend((path, t.detach().clone()) for t in tree_leaves(made) if isinstance(t, torch.Tensor))

            module.register_forward_hook(note)
    made: list[torch.Tensor] = []
    plain = other.call_step

    def keep(step: Any, a: Any, k: Any) -> Any:
        value = plain(step, a, k)
        made.extend(t.detach().clone() for t in tree_leaves(value) if isinstance(t, torch.Tensor))
        return value

    other.__dict__["call_step"] = keep
    with seeded(0):
        clone(*fresh(args), **fresh(kwargs))
    with seeded(0):
        other(*fresh(args), **fresh(kwargs))
    for path, value in seen:
        if not any(difference(value, t) <= 1e-6 for t in made if t.shape == value.shape):
            kind = type(dict(original.named_modules())[path]).__name__
            return f"module {path or 'itself'} ({kind})"
    return "an operator outside of any layer"


def _smaller(left: nn.Module, right: Traced, args: Any, kwargs: Any, loss: Loss, original: nn.Module, traced: Traced) -> bool:
    less = with_less(args, kwargs)
    if less is None or all(i.shape is None or None not in i.shape for i in traced.program.inputs):
        return False
    clone, other = copy.deepcopy(left), copy.deepcopy(right)
    try:
        a = one_step(clone, *less, loss, 0)
    except Exception:  # noqa: BLE001 - the original does not accept this batch
        return False
    try:
        b = one_step(other, *less, loss, 0)
    except Exception as e:
        raise TraceMismatch(f"a batch without its last sample fails in the traced model only: {line_of(e)[:300]}") from e
    _compare(a, b, "a batch without its last sample", original, traced, args, kwargs)
    return True


def _evaluates(left: nn.Module, right: Traced, args: Any, kwargs: Any) -> bool:
    left.eval()
    right.eval()
    try:
        with torch.no_grad():
            with seeded(0):
                a = tree_leaves(left(*fresh(args), **fresh(kwargs)))
            with seeded(0):
                b = tree_leaves(right(*fresh(args), **fresh(kwargs)))
    except Exception:  # noqa: BLE001 - the model differs in evaluation
        return False
    one, two = _states(left), _states(right)
    pairs = [*zip(a, b, strict=False), *((one[n], two[n]) for n in one if n in two)]
    same_names = set(one) == set(two) and len(a) == len(b) and set(canonical_names(left).values()) == set(canonical_names(right))
    return same_names and all(difference(x, y) <= tolerance(x.dtype) if isinstance(x, torch.Tensor) else x == y for x, y in pairs)
