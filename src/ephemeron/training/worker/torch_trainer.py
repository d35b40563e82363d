"""Any `nn.Module` with any optimiser of `torch.optim`, behind the trainer port.

Gradients are one flat tensor of which each parameter's `.grad` is a view, so that sending them copies nothing. A parameter
that took no part in a step has no gradient, here as in PyTorch, and its part of the tensor is minus zero (`tensors.absence`).
Parameters of mixed dtypes are exchanged in the widest of these, and keep their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from ephemeron.config.typed import build, plain
from ephemeron.data.batch_source import BatchSource, Positions
from ephemeron.errors import JobError
from ephemeron.training.job import Target
from ephemeron.training.tensors import ABSENT, Arrays, absent_parts
from ephemeron.training.worker.eager import eager_optimizers
from ephemeron.training.worker.losses import evaluated
from ephemeron.training.worker.torch_state import (
    OptimizerState,
    RandomState,
    TorchTrainerState,
    named_tensors,
    to_arrays,
    to_tensor,
)  # fmt: skip
from ephemeron.training.worker.trainer import EvaluationSums, TrainingStep


class TorchTrainer:
    """See `Trainer`.

    Args:
        model: in its final dtype.
        loss: `loss(output, target)`, a mean over the batch.
        optimizer: over the model's parameters.
        feed: this rank's samples.
        sampler: which samples belong to an iteration.
        exchange: `gradients`; `parameters` (local step first, then the average); `delta` (change by the local step).
        seed: of this rank's random numbers.
    """

    def __init__(
        self, *, model: nn.Module, loss: Callable[..., torch.Tensor], optimizer: torch.optim.Optimizer,
        feed: BatchSource, sampler: Positions, exchange: str, seed: int,
    ) -> None:  # fmt: skip
        self.model, self.loss, self.optimizer = model, loss, optimizer
        self.feed, self.sampler, self.exchange = feed, sampler, exchange
        self.named = _trainable(model)
        wide = self.named[0][1].dtype
        for _, p in self.named:
            wide = torch.promote_types(wide, p.dtype)
        wide = torch.float32 if wide in (torch.float16, torch.bfloat16) else wide
        self.size = sum(p.numel() for _, p in self.named)
        self.flat = torch.zeros(self.size, dtype=wide)
        self.dtype = self.flat.numpy().dtype
        self.views = []
        self._bounds: list[tuple[int, int]] = []
        self._took_part: set[int] = set()
        """Numbers of the parameters that have a gradient."""
        start = 0
        for i, (_, p) in enumerate(self.named):
            self._bounds.append((start, start + p.numel()))
            self.views.append(self.flat[start : start + p.numel()].view(p.shape))
            start += p.numel()
            p.register_post_accumulate_grad_hook(partial(_add, self._took_part, i))  # type: ignore[no-untyped-call]
        self._random = RandomState(seed)

    # -- training -----------------------------------------------------------------------------------------

    def compute(self, iteration: int) -> TrainingStep:
        batch = self.feed.batch(self.sampler, iteration)
        n = batch.samples
        if n == 0:
            self.flat.fill_(ABSENT)
            return TrainingStep(self.flat.numpy(), 0, 0.0, batch.skipped, batch.failure)
        with self._random.in_use():
            self.model.train()
            self._zero()
            loss = self.loss(self.model(self._tensor(batch.inputs)), self._tensor(batch.targets))
            torch.autograd.backward(loss)
            if self.exchange == "gradients":
                self._gather_gradients()
            else:
                self._step_locally(delta=self.exchange == "delta")
        if self.exchange != "delta":
            self.flat.mul_(n)
        return TrainingStep(self.flat.numpy(), n, float(loss.detach()), batch.skipped, batch.failure)

    def apply(self, mean: np.ndarray) -> None:
        with self._random.in_use():
            if self.exchange == "gradients":
                self.flat.copy_(torch.from_numpy(mean) if mean.flags.writeable else torch.from_numpy(mean.copy()))
                none = absent_parts(mean, self._bounds)
                for i, ((_, p), view) in enumerate(zip(self.named, self.views, strict=True)):
                    p.grad = None if i in none else view if p.dtype == view.dtype else view.to(p.dtype)
                with eager_optimizers():
                    self.optimizer.step()
            else:
                self._write(np.asarray(mean))

    def _zero(self) -> None:
        self.flat.zero_()
        self._took_part.clear()
        for (_, p), view in zip(self.named, self.views, strict=True):
            p.grad = view if p.dtype == view.dtype else None

    def _has_gradient(self, i: int) -> bool:
        p, view = self.named[i][1], self.views[i]
        if i in self._took_part:
            return p.grad is not None
        # Written by hand: PyTorch did not accumulate it.
        return p.grad is not None and (p.grad.data_ptr() != view.data_ptr() or bool(view.any()))

    def _gather_gradients(self) -> None:
        for i, ((_, p), view) in enumerate(zip(self.named, self.views, strict=True)):
            if not self._has_gradient(i):
                view.fill_(ABSENT)
            elif p.grad is not None and p.grad.data_ptr() != view.data_ptr():
                view.copy_(p.grad).add_(0.0)  # minus zero becomes zero

    def _step_locally(self, *, delta: bool) -> None:
        before = self.parameters() if delta else None
        for i, (_, p) in enumerate(self.named):
            if not self._has_gradient(i):
                p.grad = None
        with eager_optimizers():
            self.optimizer.step()
        self._read()
        if before is not None:
            self.flat.sub_(torch.from_numpy(before))

    def _read(self) -> None:
        with torch.no_grad():
            for (_, p), view in zip(self.named, self.views, strict=True):
                view.copy_(p)

    def _write(self, vector: np.ndarray) -> None:
        flat = torch.from_numpy(np.array(vector))
        start = 0
        with torch.no_grad():
            for _, p in self.named:
                p.copy_(flat[start : start + p.numel()].view(p.shape))
                start += p.numel()

    def parameters(self) -> np.ndarray:
        return torch.cat([p.detach().reshape(-1).to(self.flat.dtype) for _, p in self.named]).numpy().copy()

    def evaluate(self) -> EvaluationSums:
        self.model.eval()
        total = EvaluationSums(0.0, 0, 0)
        with torch.no_grad(), self._random.in_use():
            for part in self.feed.tests():
                if part.samples == 0:
                    continue
                targets = self._tensor(part.targets)
                output = self.model(self._tensor(part.inputs))
                total = total.plus(evaluated(self.loss, output, targets, part.samples))
        return total

    def close(self) -> None:
        self.feed.close()

    def _tensor(self, value: Any) -> Any:
        return as_tensors(value, self.named[0][1].dtype)

    # -- state --------------------------------------------------------------------------------------------

    def weights(self) -> tuple[Arrays, Mapping[str, object]]:
        arrays, bf16 = to_arrays({n: t for n, t in self.model.state_dict().items() if isinstance(t, torch.Tensor)})
        return arrays, {"bf16": bf16} if bf16 else {}

    def state(self) -> tuple[Arrays, Mapping[str, object]]:
        with eager_optimizers():
            inner = self.optimizer.state_dict()
        tensors = {f"w/{n}": t.detach() for n, t in named_tensors(self.model)}
        values: dict[str, dict[str, object]] = {}
        for index, by_name in inner["state"].items():
            for name, value in by_name.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"o/{index}/{name}"] = value.detach()
                else:
                    values.setdefault(str(index), {})[name] = value
        arrays, bf16 = to_arrays(tensors)
        arrays["random/torch"], random = self._random.save()
        optimizer = OptimizerState(values=values, groups=tuple(inner["param_groups"]))
        return arrays, plain(TorchTrainerState(bf16=tuple(bf16), optimizer=optimizer, random=random))

    def load(self, arrays: Arrays, meta: Mapping[str, object]) -> None:
        state = build(TorchTrainerState, meta, where="state of the trainer")
        bf16 = frozenset(state.bf16)
        prefix = "" if state.optimizer is None else "w/"
        with torch.no_grad():
            for name, tensor in named_tensors(self.model):
                tensor.copy_(to_tensor(arrays[prefix + name], prefix + name in bf16))
        if state.optimizer is None or state.random is None:
            return
        found: dict[int, dict[str, object]] = {int(i): dict(v) for i, v in state.optimizer.values.items()}
        for name, array in arrays.items():
            if name.startswith("o/"):
                _, index, key = name.split("/", 2)
                found.setdefault(int(index), {})[key] = to_tensor(array, name in bf16)
        groups = [{k: _betas(v) if k == "betas" else v for k, v in g.items()} for g in state.optimizer.groups]
        with eager_optimizers():
            self.optimizer.load_state_dict({"state": found, "param_groups": groups})
        self._random.restore(arrays["random/torch"], state.random)


def _betas(value: object) -> object:
    """JSON has lists only, and optimisers compare and unpack tuples."""
    return tuple(value) if isinstance(value, list) else value


def as_tensors(value: Any, dtype: torch.dtype) -> Any:
    """Arrays as tensors, floats in the parameters' dtype; trees of them likewise; anything else as it is."""
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(as_tensors(inner, dtype) for inner in value))
    if isinstance(value, (tuple, list)):
        return type(value)(as_tensors(inner, dtype) for inner in value)
    if isinstance(value, dict):
        return {key: as_tensors(inner, dtype) for key, inner in value.items()}
    if isinstance(value, np.ndarray):
        value = torch.from_numpy(np.array(value))
    if isinstance(value, torch.Tensor) and value.is_floating_point():
        return value.to(dtype)
    return value


def _add(found: set[int], number: int, _: torch.Tensor) -> None:
    found.add(number)


def _trainable(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    if not named:
        raise JobError("the model has no trainable parameter", remedy="leave requires_grad of some of them True")
    return named


def make_optimizer(target: Target, model: nn.Module) -> torch.optim.Optimizer:
    """An optimiser of `torch.optim` over a model's trainable parameters. See `optimizer_over`."""
    return optimizer_over(target, [p for _, p in _trainable(model)])


def optimizer_over(target: Target, parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    """An optimiser of `torch.optim` with its options.

    Raises:
        JobError: no such optimiser, options it refuses, or one that needs a closure.
    """
    cls = getattr(torch.optim, target.target, None)
    if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
        names = sorted(
            n for n, c in vars(torch.optim).items() if isinstance(c, type) and issubclass(c, torch.optim.Optimizer)
        )
        raise JobError(f"optimizer {target.target!r} is not in torch.optim", remedy=f"use one of {', '.join(names)}")
    if target.target == "LBFGS":
        raise JobError(
            "optimizer 'LBFGS' evaluates the loss several times a step", remedy="use a first-order optimiser"
        )
    make: Callable[..., torch.optim.Optimizer] = cls
    try:
        with eager_optimizers():
            return make(parameters, **target.options)
    except (TypeError, ValueError) as e:
        raise JobError(f"optimizer {target.target} refuses its options: {e}") from None


def make_model(target: Target, resolve: Callable[[str], Any], *, seed: int, dtype: str) -> nn.Module:
    """The user's module, initialised under the job's seed, in the job's dtype.

    Raises:
        JobError: the function does not return a module, or raises; or a parameter is complex.
    """
    function = resolve(target.target)
    outside = torch.get_rng_state()
    torch.manual_seed(seed % 2**64)  # any integer is a seed, as it is for the data
    try:
        model = function(**target.options)
    except Exception as e:
        raise JobError(f"model {target.target} raised {type(e).__name__}: {e}") from e
    finally:
        torch.set_rng_state(outside)
    if not isinstance(model, nn.Module):
        raise JobError(f"model {target.target} returned {type(model).__name__}", remedy="return a torch.nn.Module")
    for name, p in model.named_parameters():
        if p.is_complex():  # as part of a vector of real numbers it would lose its imaginary part
            raise JobError(
                f"parameter {name} of {target.target} is {p.dtype}, and functions exchange real numbers only",
                remedy="keep real and imaginary parts in one real parameter, and use torch.view_as_complex of it",
            )
    return model.double() if dtype == "float64" else model
