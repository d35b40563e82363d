"""One function's stages behind the trainer port: passes one by one, then their gradients as one vector.

The passes are those of `partition.runtime`; `pipeline.step` carries values from stage to stage. `compute` ends an iteration whose
passes are over, and `evaluate` ends an evaluation.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from ephemeron.config.typed import build, plain
from ephemeron.data.batch_source import EVALUATION_BATCH, BatchSource, Positions, TrainingBatch
from ephemeron.partition.runtime.boundaries import StageBoundary, stage_boundaries
from ephemeron.partition.runtime.codec import BoundaryValue
from ephemeron.partition.runtime.device import DeviceRun, StageMessage
from ephemeron.partition.runtime.device import MicroBatchInput as Fed
from ephemeron.partition.runtime.micro_batches import Training, cut, sizes
from ephemeron.partition.schedule_simulator.schedule import Schedule
from ephemeron.partition.tracing.split import ModelSplit
from ephemeron.runs.metrics import EvaluationSums, Metrics, means
from ephemeron.training.job import Target
from ephemeron.training.task.eager import eager_optimizers
from ephemeron.training.task.losses import Loss, evaluated
from ephemeron.training.task.program import optimizer_over
from ephemeron.training.task.tensors import as_tensors, to_arrays, to_tensor
from ephemeron.training.tensors import ABSENT, Arrays, absent_parts
from ephemeron.training.worker.trainers.flat_parameters import make_dense
from ephemeron.training.worker.trainers.trainer import TrainingStep


@dataclass(frozen=True, slots=True, kw_only=True)
class StageOptimizerState:
    """Optimiser of one device without its tensors, by name of the parameter."""

    values: Mapping[str, Mapping[str, object]] = field(default_factory=dict)
    """State values that are no tensors."""
    options: Mapping[str, Mapping[str, object]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTrainerState:
    """Plain values of a `StageTrainer`'s state; initial weights have `bf16` only."""

    bf16: tuple[str, ...] = ()
    """Names of arrays that hold the bits of bfloat16."""
    optimizer: StageOptimizerState | None = None


class StageTrainer:
    """See `Trainer`.

    Args:
        split: with this device's stages in it.
        device: name of this device.
        saved: parameters and buffers that this device writes into results: names here, by key of the original `state_dict()`.
        schedule: of micro-batches.
        loss: `loss(output, target)`.
        optimizer: made over this device's parameters.
        feed: this replica's samples; None: no stage here reads any.
        sampler: which samples belong to an iteration.
        dtype: of floating inputs.
        seed: of random steps, which draw by seed, iteration, micro-batch and name.
        alone: whether no other replica contributes, so that gradients need no weight.
    """

    def __init__(
        self,
        split: ModelSplit,
        device: str,
        *,
        saved: Mapping[str, str],
        schedule: Schedule,
        loss: Loss,
        optimizer: Target,
        feed: BatchSource | None,
        sampler: Positions,
        dtype: torch.dtype,
        seed: int,
        alone: bool = False,
    ) -> None:
        self.split, self.name, self.saved, self._alone = split, device, dict(saved), alone
        self.schedule, self.feed, self.sampler, self._inputs_dtype = schedule, feed, sampler, dtype
        self.boundaries: tuple[StageBoundary, ...] = tuple(b for b in stage_boundaries(split) if b.device == device)
        self._loss = loss
        self._outbox: list[StageMessage] = []
        training = Training(
            schedule=schedule, optimizer=lambda parameters: optimizer_over(optimizer, list(parameters)), loss=loss, seed=seed
        )
        self.device = DeviceRun(split, device, training, send=self._outbox.append, clock=time.monotonic, at=torch.device("cpu"))
        self.trained = list(self.device.updates.parameters.items())
        wide = self.trained[0][1].dtype if self.trained else torch.float32
        for _, p in self.trained:
            wide = torch.promote_types(wide, p.dtype)
        wide = torch.float32 if wide in (torch.float16, torch.bfloat16) else wide
        self.size = max(1, sum(p.numel() for _, p in self.trained))  # a stage without parameters exchanges one zero
        self.dtype: np.dtype[np.generic] = torch.zeros(0, dtype=wide).numpy().dtype
        self.flat = torch.zeros(self.size, dtype=wide)
        ends = list(itertools.accumulate(p.numel() for _, p in self.trained))
        self._bounds = list(zip([0, *ends], ends, strict=False))
        self.losses: dict[int, float] = {}
        """By micro-batch, its loss, as far as it is known here."""
        self.terms: dict[int, float] = {}
        """By micro-batch, the weight of its loss in the mean, as far as it is known here."""
        self._counts: tuple[int, ...] = ()
        """By micro-batch, its samples."""
        self._samples = 0
        self._skipped: tuple[int, str] = (0, "")
        self._sums = EvaluationSums()

    @property
    def evaluates(self) -> bool:
        """Whether the stages may be used in evaluation."""
        return self.split.traced.evaluates

    # -- passes -------------------------------------------------------------------------------------------

    def begin(self, iteration: int, samples: int) -> None:
        """A new iteration over so many samples, at least one."""
        counts = sizes(samples, self.schedule.micro_batches)
        self.losses, self.terms, self._counts, self._samples, self._skipped = {}, {}, counts, samples, (0, "")
        self.device.begin(iteration, len(counts))
        if self.feed is not None:
            batch = self.feed.batch(self.sampler, iteration)
            self._skipped = (batch.skipped, batch.failure)
            inputs, targets = (as_tensors(batch.data[0], self._inputs_dtype), as_tensors(batch.data[1], self._inputs_dtype))
            parts = cut((inputs,), {}, targets, len(counts))
            scores = any(b.last for b in self.boundaries)
            if scores:
                own = [self._loss.weight(part.targets) for part in parts]
                self.terms = {m: n if w is None else w for m, (n, w) in enumerate(zip(counts, own, strict=True))}
            total = sum(self.terms.values()) or 1.0
            for m, part in enumerate(parts):
                share = 1.0 if self._loss.summed else self.terms[m] / total if scores else part.weight
                given = self._given(part.args)
                self.device.feed(Fed(iteration=iteration, micro_batch=m, values=given, targets=part.targets, weight=share))
        elif any(b.given for b in self.boundaries):
            for m, count in enumerate(counts):
                given = self._sizes_of(count)
                self.device.feed(Fed(iteration=iteration, micro_batch=m, values=given))

    def turn(self) -> list[StageMessage]:
        """Does one pass; returns the messages for other functions."""
        self.device.run_next()
        self.losses |= {m: s.loss for m, s in self.device.scored.items()}
        sent, self._outbox[:] = list(self._outbox), []
        return sent

    def shares(self) -> dict[str, dict[str, torch.Tensor]]:
        """After all passes: gradients of parameters that other functions have, too."""
        return self.device.shared_gradients()

    def sum_shared(self, received: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Adds the gradients received from other functions."""
        self.device.updates.sum_shared(received)

    def compute(self, iteration: int) -> TrainingStep:
        """Gradients of the passes that are over; none if there were none, because the iteration has no samples here."""
        self.flat.fill_(ABSENT)
        if self.device.iteration != iteration:
            return TrainingStep(self.flat.numpy(), 0, 0.0)
        start = 0
        make_dense(p for _, p in self.trained)
        for _, p in self.trained:
            if p.grad is not None:
                self.flat[start : start + p.numel()].copy_(p.grad.reshape(-1)).add_(0.0)  # minus zero becomes zero
                p.grad = None
            start += p.numel()
        known = {m: self.terms.get(m, n) for m, n in enumerate(self._counts)}
        summed, total = self._loss.summed, float(self._samples if self._loss.summed else sum(known.values()))
        if not (self._alone or summed):
            self.flat.mul_(total)
        loss = sum((1.0 if summed else w) * self.losses.get(m, 0.0) for m, w in known.items()) / (total or 1.0)
        weight = 1.0 if self._alone else 0.0 if summed else total
        return TrainingStep(self.flat.numpy(), self._samples, loss, *self._skipped, weight=weight, terms=total)

    def apply(self, mean: np.ndarray) -> None:
        self.flat.copy_(torch.from_numpy(mean if mean.flags.writeable else mean.copy()))
        none = absent_parts(mean, self._bounds)
        for i, ((_, p), (start, stop)) in enumerate(zip(self.trained, self._bounds, strict=True)):
            view = self.flat[start:stop].view(p.shape)
            p.grad = None if i in none else view if p.dtype == view.dtype else view.to(p.dtype)
        with eager_optimizers():
            self.device.updates.step()
        self.device.updates.clear()

    def set_parameters(self, vector: np.ndarray) -> None:
        raise NotImplementedError("runs in several regions refuse stages before the launch")

    def parameters(self) -> np.ndarray:
        if not self.trained:
            return np.zeros(self.size, dtype=self.dtype)
        return torch.cat([p.detach().reshape(-1).to(self.flat.dtype) for _, p in self.trained]).numpy().copy()

    # -- evaluation ---------------------------------------------------------------------------------------

    def begin_evaluation(self) -> None:
        """Stages stop training until `evaluate`."""
        self._sums = EvaluationSums()
        for b in self.boundaries:
            self.split.stages[b.stage].eval()

    def tests(self, samples: int) -> list[tuple[dict[str, object], TrainingBatch | None]]:
        """By part of the test slice: values given to the stages, and the samples themselves where this function reads them."""
        if self.feed is None:
            counts = [min(EVALUATION_BATCH, samples - at) for at in range(0, samples, EVALUATION_BATCH)]
            known = any(b.given for b in self.boundaries)
            return [(self._sizes_of(n) if known else {}, None) for n in counts]
        return [(self._given((as_tensors(t.data[0], self._inputs_dtype),)), t) for t in self.feed.tests()]

    def forward_only(self, boundary: StageBoundary, values: Mapping[str, object], test: TrainingBatch | None) -> dict[str, BoundaryValue]:
        """One stage over one part; the last one scores it."""
        with torch.no_grad():
            made: dict[str, BoundaryValue] = self.split.stages[boundary.stage](values)
            if boundary.last and test is not None:
                output = self.split.traced.result({**values, **made})
                targets = as_tensors(test.data[1], self._inputs_dtype)
                self._sums = self._sums.plus(evaluated(self._loss, output, targets, test.samples))
        return made

    def evaluate(self) -> EvaluationSums:
        """Sums of the last stage since `begin_evaluation`; zeros elsewhere."""
        for b in self.boundaries:
            self.split.stages[b.stage].train()
        return self._sums

    initial_first = False

    def metrics(self, parts: Sequence[EvaluationSums]) -> Metrics:
        return means(parts)

    def take_metrics(self, metrics: Metrics) -> None:
        """No scheduler of stages depends on metrics: `prepare` refuses them."""

    # -- inputs -------------------------------------------------------------------------------------------

    def _given(self, args: tuple[object, ...]) -> dict[str, object]:
        given: dict[str, object] = self.split.traced.named_inputs(args, {})
        return given | self.split.numbers(given)

    def _sizes_of(self, samples: int) -> dict[str, object]:
        """Sizes that follow from the inputs, for stages that read no input itself."""
        given: dict[str, object] = {
            i.name: i.value if i.shape is None else torch.empty([samples if n is None else n for n in i.shape], device="meta")
            for i in self.split.traced.program.inputs
        }
        return given | self.split.numbers(given)

    # -- state --------------------------------------------------------------------------------------------

    def weights(self) -> tuple[Arrays, Mapping[str, object]]:
        """This device's part of the original model's `state_dict()`."""
        states = self._states()
        arrays, bf16 = to_arrays({key: states[name] for key, name in self.saved.items()})
        return arrays, {"bf16": bf16} if bf16 else {}

    def state(self) -> tuple[Arrays, Mapping[str, object]]:
        tensors = {f"w/{n}": t for n, t in self._states().items()}
        values: dict[str, dict[str, object]] = {}
        with eager_optimizers():
            states, options = self.device.updates.state()
        for name, by_key in states.items():
            for key, value in by_key.items():
                if isinstance(value, torch.Tensor):
                    tensors[f"o/{key}/{name}"] = value.detach()
                else:
                    values.setdefault(name, {})[key] = value
        arrays, bf16 = to_arrays(tensors)
        optimizer = StageOptimizerState(values=values, options=options)
        return arrays, plain(StageTrainerState(bf16=tuple(bf16), optimizer=optimizer))

    def load(self, arrays: Arrays, meta: Mapping[str, object], *, shared: bool = False) -> None:
        state = build(StageTrainerState, meta, where="state of the stage")
        bf16 = frozenset(state.bf16)
        prefix = "" if state.optimizer is None else "w/"
        with torch.no_grad():
            for name, tensor in self._states().items():
                tensor.copy_(to_tensor(arrays[prefix + name], prefix + name in bf16))
        if state.optimizer is None:
            return
        states: dict[str, dict[str, object]] = {n: dict(v) for n, v in state.optimizer.values.items()}
        for name, array in arrays.items():
            if name.startswith("o/"):
                _, key, of = name.split("/", 2)
                states.setdefault(of, {})[key] = to_tensor(array, name in bf16)
        with eager_optimizers():
            self.device.updates.load(states, state.optimizer.options)

    shares_after_compute = False

    def private_state(self) -> tuple[Arrays, Mapping[str, object]]:
        return self.state()

    @property
    def private_nbytes(self) -> int:
        return 3 * self.flat.nbytes

    def load_private(self, arrays: Arrays, meta: Mapping[str, object]) -> None:
        self.load(arrays, meta)

    def close(self) -> None:
        if self.feed is not None:
            self.feed.close()

    def _states(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers of this device, each once."""
        made: dict[str, torch.Tensor] = {}
        for b in self.boundaries:
            stage = self.split.stages[b.stage]
            for name, t in (*stage.named_parameters(), *stage.named_buffers()):
                made.setdefault(name, t.detach())
        return made
