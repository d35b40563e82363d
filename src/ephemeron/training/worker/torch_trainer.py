"""A training program in PyTorch behind the trainer port.

Gradients are one flat tensor of which each parameter's `.grad` is a view, so that sending them copies nothing. A parameter
that took no part in a step has no gradient, here as in PyTorch, and its part of the tensor is minus zero (`tensors.absence`).
Parameters of mixed dtypes are exchanged in the widest of these, and keep their own. On an accelerator the flat tensor lies
there, with a pinned copy on the host for the exchange.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from ephemeron.config.typed import build, plain
from ephemeron.data.batch_source import BatchSource, Positions
from ephemeron.errors import JobError
from ephemeron.training.job import Target
from ephemeron.training.metrics import EvaluationSums, Metrics
from ephemeron.training.task.eager import eager_optimizers
from ephemeron.training.task.evaluation import Evaluator, metrics_of
from ephemeron.training.task.moving_average import MovingAverage
from ephemeron.training.task.outer_optimizer import OuterOptimizer
from ephemeron.training.task.part_report import PartReport, averaged, backward
from ephemeron.training.task.program import Program, trainable
from ephemeron.training.task.staleness import OwnGradient, ProvisionalSteps
from ephemeron.training.task.state_codec import pack, unpack
from ephemeron.training.task.task import StatefulTask
from ephemeron.training.task.tensors import as_tensors, named_tensors, parts_of, to_arrays, to_tensor
from ephemeron.training.tensors import ABSENT, Arrays, absent_parts
from ephemeron.training.worker.early_pieces import EarlyPieces
from ephemeron.training.worker.flat_parameters import make_dense, wide_dtype
from ephemeron.training.worker.gradient_pieces import GradientPieces
from ephemeron.training.worker.torch_state import RandomState, TorchTrainerState
from ephemeron.training.worker.trainer import TrainingStep


class TorchTrainer:
    """See `Trainer`.

    Args:
        program: task, model in its final dtype, optimisers and schedulers.
        feed: this rank's samples.
        sampler: which samples belong to an iteration.
        exchange: `gradients`; `parameters` (local steps first, then the average); `deltas` (parameters before the local steps less
            those after them, for the outer optimiser); `changes` (the contrary, added by a server).
        seed: of this rank's random numbers.
        alone: whether no other rank contributes, so that gradients need no weight and stay as PyTorch has computed them.
        provisional: whether gradients are computed after provisional steps for versions that are not applied yet.
        local_steps: optimiser steps of an iteration, each with its part of the batch, where `exchange` is not `gradients`.
        outer: optimiser of `deltas`.
    """

    def __init__(
        self, program: Program, *, feed: BatchSource, sampler: Positions, exchange: str, seed: int, alone: bool = False,
        provisional: bool = False, local_steps: int = 1, outer: Target | None = None,
    ) -> None:  # fmt: skip
        self.program, self.model = program, program.model
        self.feed, self.sampler, self.exchange, self._alone = feed, sampler, exchange, alone
        self.device = device_of(program.options.device)
        if self.device.type != "cpu":
            self.model.to(self.device)
        self.named = trainable(self.model)
        wide = wide_dtype([p for _, p in self.named])
        self.size = sum(p.numel() for _, p in self.named)
        self.flat = torch.zeros(self.size, dtype=wide, device=self.device)
        self._host = self.flat if self.device.type == "cpu" else torch.zeros(self.size, dtype=wide, pin_memory=True)
        self.dtype = self._host.numpy().dtype
        self.views: list[torch.Tensor] = []
        self._bounds: list[tuple[int, int]] = []
        start = 0
        for _, p in self.named:
            self._bounds.append((start, start + p.numel()))
            self.views.append(self.flat[start : start + p.numel()].view(p.shape))
            start += p.numel()
        self._pieces = GradientPieces(self.flat, self.views, self._bounds)
        for i, (_, p) in enumerate(self.named):
            self._pieces.watch(i, p)
        self._took_part = self._pieces.took_part
        """Numbers of the parameters that have a gradient."""
        self._groups = _owned(self.named, program.optimizers) if program.takes_turns else []
        self._call: nn.Module = torch.compile(self.model) if program.options.compile else self.model  # type: ignore[assignment]
        self._local_steps = local_steps
        self._steps = self._versions = 0
        """Optimiser steps, and merged versions that were applied, so far."""
        self._random = RandomState(seed)
        self._draws_in_apply = False
        """Whether an update has drawn random numbers."""
        parameters = [p for _, p in self.named]
        self._outer = OuterOptimizer(outer, parameters) if exchange == "deltas" else None
        self._own: ProvisionalSteps | None = None
        if provisional:
            stepped = (program.optimizers, self._step_optimizers) if self._outer is None else self._outer.stepped
            self._own = ProvisionalSteps(parameters, *stepped)
        self._average = MovingAverage(self.named, program.options.ema_decay)
        self._metrics: Mapping[str, Any] = {}

    @property
    def initial_first(self) -> bool:
        """Whether a state holds no frozen parameters, so that initial weights are loaded before it."""
        return len(self.named) < sum(1 for _ in self.model.parameters())

    # -- training -----------------------------------------------------------------------------------------

    def give_early(self, to: EarlyPieces | None) -> None:
        """See `GivesEarly`. None are given of local steps, after provisional ones, or on an accelerator."""
        whole = self.exchange != "gradients" or self._alone or self._own is not None or self._host is not self.flat
        self._pieces.to = None if whole else to

    def compute(self, iteration: int) -> TrainingStep:
        batch = self.feed.batch(self.sampler, iteration)
        n, first = batch.samples, iteration * self._local_steps
        if n == 0:
            if self.exchange != "gradients":
                self._advance_schedulers(self._local_steps)
            self._record(iteration, took_part=False)
            self._host.fill_(ABSENT)
            return TrainingStep(self._host.numpy(), 0, 0.0, batch.skipped, batch.failure)
        self.program.task.global_step = first
        with self._random.in_use(), self._own.taken() if self._own is not None else nullcontext():
            self.model.train()
            data = self._tensors(batch.data)
            if self.exchange == "gradients":
                reports = self._gradients(data, n, self._turn(first))
                self._gather_gradients()
            else:
                reports = self._train_locally(data, n, first)
        weight = sum(report.weight for report in reports)
        self._record(iteration)
        if self.exchange != "changes" and not self._alone:
            self._pieces.finish(weight)
        metrics = averaged(reports, weight)
        if self._host is not self.flat:
            self._host.copy_(self.flat)
        return TrainingStep(
            self._host.numpy(), n, metrics.pop("loss"), batch.skipped, batch.failure,
            weight=1.0 if self._alone else weight, metrics=metrics,
        )  # fmt: skip

    def _gradients(self, batch: Any, n: int, turn: int | None) -> list[PartReport]:
        """Gradients of one optimiser step's batch, in the parameters."""
        with self._only(turn):
            self._zero(turn)
            parts = parts_of(batch, n, self.program.options.accumulate)
            reports: list[PartReport] = []
            for part, samples in parts:
                last = len(reports) + 1 == len(parts)
                report = backward(
                    self.program.task, self._call, part, samples=samples, whole=n, turn=turn, autocast=self._autocast(),
                    weighed=partial(self._begin_last, reports) if last and self._pieces.to is not None else None,
                )  # fmt: skip
                reports.append(report)
            make_dense(p for _, p in self.named)
            if len(reports) > 1 and reports[0].given:
                self._divide_gradients(sum(report.weight for report in reports))
        return reports

    def _begin_last(self, reports: Sequence[PartReport], weight: float, given: bool, loss: float) -> None:
        """Before the last backward pass of a batch: pieces may be sent while it goes on, unless its gradients are divided afterwards."""
        if not (given and reports) and all(map(math.isfinite, [loss, *(r.metrics["loss"] for r in reports)])):
            self._pieces.begin(sum(r.weight for r in reports) + weight)

    def _train_locally(self, batch: Any, n: int, first: int) -> list[PartReport]:
        """Optimiser steps with this rank's own gradients, as many as there are samples for; then the exchanged vector.

        Args:
            batch, n: samples of the whole iteration.
            first: number of the first of its steps.
        """
        task, before = self.program.task, None
        if self.exchange != "parameters":
            before = torch.from_numpy(self.parameters()).to(self.device)
        took_part: set[int] = set()
        reports: list[PartReport] = []
        parts = parts_of(batch, n, self._local_steps, option="local_steps")
        for step, (part, samples) in enumerate(parts, start=first):
            if step > first:
                task.global_step = step
                task.on_step_end(self.model)
            turn = self._turn(step)
            reports += self._gradients(part, samples, turn)
            for i, (_, p) in enumerate(self.named):
                if self._has_gradient(i):
                    took_part.add(i)
                else:
                    p.grad = None
            self._step(turn)
        self._advance_schedulers(self._local_steps - len(parts))
        self._took_part |= took_part  # the very set that the hooks add to
        self._read()
        if before is not None and self._outer is None:
            self.flat.sub_(before)
        elif before is not None:
            torch.sub(before, self.flat, out=self.flat).add_(0.0)  # minus zero becomes zero
            self._write(before)
            for i, view in enumerate(self.views):
                if i not in took_part:
                    view.fill_(ABSENT)
        return reports

    def _divide_gradients(self, weight: float) -> None:
        with torch.no_grad():
            for i, (_, p) in enumerate(self.named):
                if self._has_gradient(i) and p.grad is not None:
                    p.grad.div_(weight or 1.0)

    def apply(self, mean: np.ndarray) -> None:
        with self._random.in_use() as before:
            if self.exchange in ("gradients", "deltas"):
                self._host.copy_(torch.from_numpy(mean) if mean.flags.writeable else torch.from_numpy(mean.copy()))
                if self._host is not self.flat:
                    self.flat.copy_(self._host)
                none = absent_parts(mean, self._bounds)
                for i, ((_, p), view) in enumerate(zip(self.named, self.views, strict=True)):
                    p.grad = None if i in none else view if p.dtype == view.dtype else view.to(p.dtype)
                if self._own is not None:
                    self._own.applied(self._versions)
                if self._outer is not None:
                    self._outer.step()
                else:
                    self._step(self._turn(self._steps))
            else:
                self._write(torch.from_numpy(np.array(mean)))
            self._versions += 1
            self.program.task.global_step = self._steps
            self.program.task.on_step_end(self.model)
            self._average.update()
        self._draws_in_apply |= not self._random.is_at(before)

    def _step(self, turn: int | None) -> None:
        """Clips the gradients, and steps optimisers and schedulers."""
        self._step_optimizers(turn)
        self._advance_schedulers(1)

    def _advance_schedulers(self, steps: int) -> None:
        """Counts optimiser steps, also those for which this rank had no samples."""
        for _ in range(steps):
            turn = self._turn(self._steps)
            self._steps += 1
            for each in self.program.schedulers:
                if each.monitor is not None:
                    continue
                if each.interval == "step":
                    own = (
                        self._steps
                        if turn is None
                        else -(-(self._steps - each.optimizer) // len(self.program.optimizers))
                    )
                    due = (turn is None or turn == each.optimizer) and own % each.frequency == 0
                else:
                    due = self.program.ends_epoch(self._steps, each.frequency)
                if due:
                    with eager_optimizers():
                        each.scheduler.step()

    def _step_optimizers(self, turn: int | None) -> None:
        """Clips the gradients, and steps the optimiser whose turn it is, or all."""
        options = self.program.options
        parameters = [p for _, p in self.named]
        if options.clip_value is not None:
            nn.utils.clip_grad_value_(parameters, options.clip_value)
        if options.clip_norm is not None:
            nn.utils.clip_grad_norm_(parameters, options.clip_norm)
        with eager_optimizers():
            for i, optimizer in enumerate(self.program.optimizers):
                if turn is None or i == turn:
                    optimizer.step()

    def _record(self, iteration: int, *, took_part: bool = True) -> None:
        """Keeps this rank's gradient, a mean over its batch, or delta until its version is applied. Without a batch it is zero."""
        if self._own is None:
            return
        own = self.flat.clone() if took_part else torch.zeros_like(self.flat)
        parts = [own[a:b].view(p.shape) for (a, b), (_, p) in zip(self._bounds, self.named, strict=True)]
        has = self._has_gradient if self._outer is None else self._took_part.__contains__
        turn = self._turn(iteration) if self._outer is None else None
        none = {i for i in range(len(parts)) if took_part and not has(i)}
        taken = tuple(None if i in none else part for i, part in enumerate(parts))
        self._own.computed(OwnGradient(iteration, turn, taken))

    def _turn(self, step: int) -> int | None:
        """Number of the optimiser whose turn it is; None: all step together."""
        return step % len(self.program.optimizers) if self._groups else None

    @contextmanager
    def _only(self, turn: int | None) -> Iterator[None]:
        """Only the parameters of one optimiser require gradients."""
        others = [] if turn is None else [p for i, (_, p) in enumerate(self.named) if i not in self._groups[turn]]
        for p in others:
            p.requires_grad_(False)
        try:
            yield
        finally:
            for p in others:
                p.requires_grad_(True)

    def _zero(self, turn: int | None) -> None:
        self.flat.zero_()
        self._pieces.reset()
        for i, ((_, p), view) in enumerate(zip(self.named, self.views, strict=True)):
            own = turn is None or i in self._groups[turn]
            p.grad = view if own and p.dtype == view.dtype else None

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

    def _read(self) -> None:
        with torch.no_grad():
            for (_, p), view in zip(self.named, self.views, strict=True):
                view.copy_(p)

    def _write(self, flat: torch.Tensor) -> None:
        start = 0
        with torch.no_grad():
            for _, p in self.named:
                p.copy_(flat[start : start + p.numel()].view(p.shape))
                start += p.numel()

    def parameters(self) -> np.ndarray:
        flat = torch.cat([p.detach().reshape(-1).to(self.flat.dtype) for _, p in self.named])
        return flat.cpu().numpy().copy()

    def set_parameters(self, vector: np.ndarray) -> None:
        self._write(torch.from_numpy(np.array(vector)).to(self.device))

    def _autocast(self) -> AbstractContextManager[object]:
        if self.program.options.precision == "bf16-mixed":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def close(self) -> None:
        self.feed.close()

    def _tensors(self, value: Any) -> Any:
        dtype = self.named[0][1].dtype if self.program.task.cast_inputs else None
        return as_tensors(value, dtype, None if self.device.type == "cpu" else self.device)

    # -- evaluation ---------------------------------------------------------------------------------------

    def evaluate(self) -> EvaluationSums:
        self.model.eval()
        found = Evaluator()
        for metric in self._metrics.values():
            metric.reset()
        with torch.no_grad(), self._random.in_use(), self._average.in_use():
            for part in self.feed.tests():
                if part.samples:
                    with self._autocast():
                        report = self.program.task.evaluation_step(self._call, self._tensors(part.data))
                    found.add(report, part.samples)
        self._metrics = found.metrics
        return found.result()

    def metrics(self, parts: Sequence[EvaluationSums]) -> Metrics:
        merged = metrics_of(parts, self._metrics)
        known = {name: value for name, value in merged.items() if value is not None}
        found = {**merged, **self.program.task.evaluation_end(known)}
        return {name: value for name, value in found.items() if not name.startswith("_")}

    def take_metrics(self, metrics: Metrics) -> None:
        for each in self.program.schedulers:
            if each.monitor is None:
                continue
            value = metrics.get(each.monitor)
            if value is None:
                raise JobError(
                    f"the scheduler monitors {each.monitor!r}, which the evaluation does not report",
                    remedy=f"monitor one of {', '.join(metrics)}",
                )
            each.scheduler.step(value)

    # -- state --------------------------------------------------------------------------------------------

    def weights(self) -> tuple[Arrays, Mapping[str, object]]:
        with self._average.in_use():
            tensors = {n: t for n, t in self.model.state_dict().items() if isinstance(t, torch.Tensor)}
            arrays, bf16 = to_arrays(tensors)
        return arrays, {"bf16": bf16} if bf16 else {}

    def state(self) -> tuple[Arrays, Mapping[str, object]]:
        frozen = {n for n, p in self.model.named_parameters() if not p.requires_grad}
        tensors = {f"w/{n}": t for n, t in named_tensors(self.model) if n not in frozen}
        tensors |= {f"e/{n}": t for n, t in self._average.values.items()}
        arrays, bf16 = to_arrays(tensors)
        held: dict[str, object] = {"steps": self._steps, "versions": self._versions, "optimizers": [], "schedulers": []}
        with eager_optimizers():
            held["optimizers"] = [o.state_dict() for o in self.program.optimizers]
        held["schedulers"] = [s.scheduler.state_dict() for s in self.program.schedulers]
        if self._outer is not None:
            held["outer"] = self._outer.state()
        if self._own is not None:
            held["own"] = self._own.state()
        if isinstance(self.program.task, StatefulTask):
            held["task"] = self.program.task.state_dict()
        packed = pack(held, "o", arrays)
        assert isinstance(packed, Mapping)
        random = self._random.save(arrays)
        return arrays, plain(TorchTrainerState(bf16=tuple(bf16), program=packed, random=random))

    def load(self, arrays: Arrays, meta: Mapping[str, object], *, shared: bool = False) -> None:
        state = build(TorchTrainerState, meta, where="state of the trainer")
        bf16 = frozenset(state.bf16)
        prefix = "" if state.random is None else "w/"
        with torch.no_grad():
            for name, tensor in named_tensors(self.model):
                if prefix + name in arrays or not prefix:
                    tensor.copy_(to_tensor(arrays[prefix + name], prefix + name in bf16))
        known = {n: f"e/{n}" for n in self._average.values if f"e/{n}" in arrays}
        self._average.load({n: to_tensor(arrays[key], key in bf16) for n, key in known.items()})
        if state.random is None:
            return
        held = unpack(state.program, arrays)
        self._steps, self._versions = held["steps"], held["versions"]
        with eager_optimizers():
            for optimizer, own in zip(self.program.optimizers, held["optimizers"], strict=True):
                optimizer.load_state_dict(own)
        for each, own in zip(self.program.schedulers, held["schedulers"], strict=True):
            each.scheduler.load_state_dict(own)
        if self._outer is not None:
            self._outer.load(held["outer"])
        if isinstance(self.program.task, StatefulTask):
            self.program.task.load_state_dict(held["task"])
        if shared:
            return
        if self._own is not None:
            self._own.load(held.get("own", ()))
        self._random.restore(arrays, state.random)

    @property
    def shares_after_compute(self) -> bool:
        return self.exchange == "gradients" and not self._draws_in_apply

    def private_state(self) -> tuple[Arrays, Mapping[str, object]]:
        arrays, bf16 = to_arrays({f"b/{n}": t for n, t in self.model.named_buffers()})
        held: dict[str, object] = {}
        if self.exchange != "gradients":  # they have stepped with this rank's own gradients
            with eager_optimizers():
                held["optimizers"] = [o.state_dict() for o in self.program.optimizers]
        if self._own is not None:
            held["own"] = self._own.state()
        if isinstance(self.program.task, StatefulTask):
            held["task"] = self.program.task.state_dict()
        packed = pack(held, "o", arrays)
        assert isinstance(packed, Mapping)
        random = self._random.save(arrays)
        return arrays, plain(TorchTrainerState(bf16=tuple(bf16), program=packed, random=random))

    @property
    def private_nbytes(self) -> int:
        stepped = 0 if self.exchange == "gradients" else 3 * self.flat.nbytes
        return stepped + sum(b.nbytes for b in self.model.buffers())

    def load_private(self, arrays: Arrays, meta: Mapping[str, object]) -> None:
        state = build(TorchTrainerState, meta, where="private state of the trainer")
        assert state.random is not None
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                buffer.copy_(to_tensor(arrays[f"b/{name}"], f"b/{name}" in state.bf16))
        held = unpack(state.program, arrays)
        with eager_optimizers():
            for optimizer, own in zip(self.program.optimizers, held.get("optimizers", ()), strict=False):
                optimizer.load_state_dict(own)
        if self._own is not None:
            self._own.load(held.get("own", ()))
        if isinstance(self.program.task, StatefulTask):
            self.program.task.load_state_dict(held["task"])
        self._random.restore(arrays, state.random)


def device_of(name: str) -> torch.device:
    """The device of a name; `auto` is an accelerator if there is one.

    Raises:
        JobError: this machine has no such device.
    """
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if name == "auto":
        name = next(kind for kind in ("cuda", "mps", "cpu") if present[kind])
    if not present[name]:
        raise JobError(f"device = {name!r}, which this function does not have", remedy='use device = "auto" or "cpu"')
    return torch.device(name)


def _owned(named: Sequence[tuple[str, nn.Parameter]], optimizers: Sequence[torch.optim.Optimizer]) -> list[set[int]]:
    """By optimiser, the numbers of its parameters."""
    number = {id(p): i for i, (_, p) in enumerate(named)}
    return [{number[id(p)] for group in o.param_groups for p in group["params"] if id(p) in number} for o in optimizers]
