"""A training program in PyTorch behind the trainer port: steps, evaluation and schedulers.

The vector that is exchanged is in `flat_gradients`, the state that is saved in `program_state`.
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

from ephemeron.data.batch_source import BatchSource, Positions
from ephemeron.data.randomness import words_of
from ephemeron.errors import JobError
from ephemeron.runs.metrics import EvaluationSums, Metrics, merged
from ephemeron.training.job import Target
from ephemeron.training.task.eager import eager_optimizers
from ephemeron.training.task.evaluation import Evaluator, metrics_of, recorded_after
from ephemeron.training.task.moving_average import MovingAverage
from ephemeron.training.task.outer_optimizer import OuterOptimizer
from ephemeron.training.task.part_report import PartReport, averaged, backward
from ephemeron.training.task.program import JobTask, Program, trainable
from ephemeron.training.task.staleness import OwnGradient, ProvisionalSteps
from ephemeron.training.task.task import Task
from ephemeron.training.task.tensors import as_tensors, parts_of
from ephemeron.training.tensors import ABSENT, Arrays, absent_parts
from ephemeron.training.worker.trainers.early_pieces import EarlyPieces
from ephemeron.training.worker.trainers.flat_parameters import FlatGradients, make_dense
from ephemeron.training.worker.trainers.program_state import Counters, ProgramState
from ephemeron.training.worker.trainers.torch_state import RandomState
from ephemeron.training.worker.trainers.trainer import TrainingStep


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
        self,
        program: Program,
        *,
        feed: BatchSource,
        sampler: Positions,
        exchange: str,
        seed: int,
        alone: bool = False,
        provisional: bool = False,
        local_steps: int = 1,
        outer: Target | None = None,
    ) -> None:
        self.program, self.model = program, program.model
        self.feed, self.sampler, self.exchange, self._alone = feed, sampler, exchange, alone
        self.device = find_device(program.options.device)
        if self.device.type != "cpu":
            self.model.to(self.device)
        self.named = trainable(self.model)
        self._vector = FlatGradients(self.named, self.device)
        self.size, self.dtype = self._vector.size, self._vector.dtype
        self._groups = _owned(self.named, program.optimizers) if program.takes_turns else []
        self._call: nn.Module = torch.compile(self.model) if program.options.compile else self.model  # type: ignore[assignment]
        self._local_steps = local_steps
        self._counters = Counters()
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
        self._state = ProgramState(
            program=program,
            counters=self._counters,
            average=self._average,
            random=self._random,
            outer=self._outer,
            own=self._own,
            steps_locally=exchange != "gradients",
        )

        self._generators = self._state.generators()
        """Random generators of the program's own."""

    @property
    def initial_first(self) -> bool:
        """Whether a state holds no frozen parameters, so that initial weights are loaded before it."""
        return len(self.named) < sum(1 for _ in self.model.parameters())

    # -- training -----------------------------------------------------------------------------------------

    def give_early(self, to: EarlyPieces | None) -> None:
        """See `GivesEarly`. None are given of local steps, after provisional ones, or on an accelerator."""
        whole = self.exchange != "gradients" or self._alone or self._own is not None or not self._vector.is_on_host
        self._vector.pieces.to = None if whole else to

    def compute(self, iteration: int) -> TrainingStep:
        batch = self.feed.batch(self.sampler, iteration)
        n, first = batch.samples, iteration * self._local_steps
        if n == 0:
            if self.exchange != "gradients":
                self._advance_schedulers(self._local_steps)
            self._record(iteration, took_part=False)
            return TrainingStep(self._vector.absent(), 0, 0.0, batch.skipped, batch.failure)
        self.program.task.global_step = first
        with self._random.in_use(), self._own.taken() if self._own is not None else nullcontext():
            self.model.train()
            data = self.tensors(batch.data)
            if self.exchange == "gradients":
                reports = self._gradients(data, n, self._turn(first))
                self._vector.gather()
            else:
                reports = self._train_locally(data, n, first)
        weight = sum(report.weight for report in reports)
        self._record(iteration)
        adds = self.exchange == "gradients" and reports[0].summed  # a total weight of 0 leaves the sum of the vectors
        if self.exchange != "changes" and not self._alone:
            self._vector.pieces.finish(1.0 if adds else weight)
        metrics = averaged(reports, weight)
        nothing = self.exchange != "gradients" and weight == 0
        return TrainingStep(
            self._vector.absent() if nothing else self._vector.to_host(),
            n,
            metrics.pop("loss"),
            batch.skipped,
            batch.failure,
            weight=1.0 if self._alone else 0.0 if adds else weight,
            metrics=metrics,
            terms=weight,
        )

    def _gradients(self, batch: Any, n: int, turn: int | None) -> list[PartReport]:
        """Gradients of one optimiser step's batch, in the parameters."""
        with self._only(turn):
            self._vector.zero(None if turn is None else self._groups[turn])
            parts = parts_of(batch, n, self.program.options.accumulate)
            reports: list[PartReport] = []
            for part, samples in parts:
                last = len(reports) + 1 == len(parts)
                report = backward(
                    self.program.task,
                    self._call,
                    part,
                    samples=samples,
                    whole=n,
                    turn=turn,
                    autocast=self._autocast(),
                    weighed=partial(self._begin_last, n, reports) if last and self._vector.pieces.to is not None else None,
                )
                reports.append(report)
            make_dense(p for _, p in self.named)
            weight = sum(report.weight for report in reports)
            if len(reports) > 1 and not reports[0].summed and weight not in (0, n):
                self._vector.divide(weight / n)
        return reports

    def _begin_last(self, n: int, reports: Sequence[PartReport], weight: float, summed: bool, loss: float) -> None:
        """Before the last backward pass of a batch: pieces may be sent while it goes on, unless its gradients change afterwards."""
        total = sum(r.weight for r in reports) + weight
        final = not summed and (not reports or total == n)
        if final and all(map(math.isfinite, [loss, *(r.metrics.get("loss", 0.0) for r in reports)])):
            self._vector.pieces.begin(total)

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
            found = self._gradients(part, samples, turn)
            reports += found
            for i, (_, p) in enumerate(self.named):
                if self._vector.has(i):
                    took_part.add(i)
                else:
                    p.grad = None
            if any(report.weight for report in found):
                self._step(turn)
            else:  # all ranks stay alike if none of them has anything to train on
                self._advance_schedulers(1)
        self._advance_schedulers(self._local_steps - len(parts))
        self._vector.took_part |= took_part  # the very set that the hooks add to
        self._vector.read_parameters()
        if before is not None and self._outer is None:
            self._vector.flat.sub_(before)
        elif before is not None:
            torch.sub(before, self._vector.flat, out=self._vector.flat).add_(0.0)  # minus zero becomes zero
            self._vector.write_parameters(before)
            for i, view in enumerate(self._vector.views):
                if i not in took_part:
                    view.fill_(ABSENT)
        return reports

    def apply(self, mean: np.ndarray) -> None:
        words = [words_of(each) for each in self._generators]
        with self._random.in_use() as before:
            if self.exchange in ("gradients", "deltas"):
                self._vector.scatter(mean)
                if self._own is not None:
                    self._own.applied(self._counters.versions)
                if self._outer is not None:
                    self._outer.step()
                else:
                    self._step(self._turn(self._counters.steps))
            elif not absent_parts(mean, [(0, self.size)]):  # of batches without weight there is no mean
                self._vector.write_parameters(torch.from_numpy(np.array(mean)))
            self._counters.versions += 1
            self.program.task.global_step = self._counters.steps
            self.program.task.on_step_end(self.model)
            self._average.update()
        self._draws_in_apply |= not self._random.is_at(before) or words != [words_of(each) for each in self._generators]

    def _step(self, turn: int | None) -> None:
        """Clips the gradients, and steps optimisers and schedulers."""
        self._step_optimizers(turn)
        self._advance_schedulers(1)

    def skip(self, iterations: int) -> None:
        """See `SkipsIterations`."""
        self._advance_schedulers(iterations * max(1, self._local_steps))

    def _advance_schedulers(self, steps: int) -> None:
        """Counts optimiser steps, also those for which this rank had no samples."""
        for _ in range(steps):
            turn = self._turn(self._counters.steps)
            self._counters.steps += 1
            for each in self.program.schedulers:
                if each.monitor is not None:
                    continue
                if each.interval == "step":
                    own = (
                        self._counters.steps
                        if turn is None
                        else -(-(self._counters.steps - each.optimizer) // len(self.program.optimizers))
                    )
                    due = (turn is None or turn == each.optimizer) and own % each.frequency == 0
                else:
                    due = self.program.ends_epoch(self._counters.steps, each.frequency)
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
        vector = self._vector
        own = vector.flat.clone() if took_part else torch.zeros_like(vector.flat)
        parts = [own[a:b].view(p.shape) for (a, b), (_, p) in zip(vector.bounds, self.named, strict=True)]
        has = vector.has if self._outer is None else vector.took_part.__contains__
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

    def parameters(self) -> np.ndarray:
        return self._vector.parameter_values()

    def set_parameters(self, vector: np.ndarray) -> None:
        self._vector.write_parameters(torch.from_numpy(np.array(vector)).to(self.device))

    def _autocast(self) -> AbstractContextManager[object]:
        if self.program.options.precision == "bf16-mixed":
            return torch.autocast(self.device.type, dtype=torch.bfloat16)
        return nullcontext()

    def close(self) -> None:
        self.feed.close()

    def tensors(self, value: Any) -> Any:
        """A batch as the program gets it."""
        dtype = self.named[0][1].dtype if self.program.task.cast_inputs else None
        return as_tensors(value, dtype, None if self.device.type == "cpu" else self.device)

    # -- evaluation ---------------------------------------------------------------------------------------

    def evaluate(self) -> EvaluationSums:
        self.model.eval()
        found = Evaluator()
        for metric in self._metrics.values():
            metric.reset()
        # What a job's loss or a task's `training_step` computes says by its graph what it is a mean over; other steps say so themselves.
        own = type(self.program.task).evaluation_step not in (Task.evaluation_step, JobTask.evaluation_step)
        same = not own and not self.program.options.compile
        graph = partial(recorded_after, self.model) if same else nullcontext
        with torch.no_grad(), self._random.in_use(), self._average.in_use():
            for part in self.feed.tests():
                if part.samples:
                    with self._autocast(), graph():
                        report = self.program.task.evaluation_step(self._call, self.tensors(part.data))
                    found.add(report, part.samples)
        self._metrics = found.metrics
        return found.result()

    def metrics(self, parts: Sequence[EvaluationSums]) -> Metrics:
        values = metrics_of(parts, self._metrics)
        known = {name: value for name, value in values.items() if value is not None}
        # Of data without a label, such as a small slice or the trial's, the task's own numbers are NaN, too.
        known |= {name: math.nan for name, total in merged(parts).sums.items() if total is not None and not total[1]}
        found = {**values, **self.program.task.evaluation_end(known)}
        return {name: None if value is None or math.isnan(value) else value for name, value in found.items() if not name.startswith("_")}

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
        return self._state.weights()

    def files(self) -> Arrays:
        """See `WritesFiles`."""
        self.program.task.on_end(self.model)
        return self._state.outputs.files()

    def state(self) -> tuple[Arrays, Mapping[str, object]]:
        return self._state.save()

    def load(self, arrays: Arrays, meta: Mapping[str, object], *, shared: bool = False) -> None:
        self._state.load(arrays, meta, shared=shared)

    @property
    def shares_after_compute(self) -> bool:
        return self.exchange == "gradients" and not self._draws_in_apply

    def private_state(self) -> tuple[Arrays, Mapping[str, object]]:
        return self._state.save_private()

    @property
    def private_nbytes(self) -> int:
        stepped = 0 if self.exchange == "gradients" else 3 * self._vector.flat.nbytes
        return stepped + sum(b.nbytes for b in self.model.buffers())

    def load_private(self, arrays: Arrays, meta: Mapping[str, object]) -> None:
        self._state.load_private(arrays, meta)


def find_device(name: str) -> torch.device:
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
