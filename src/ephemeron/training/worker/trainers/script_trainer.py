"""A script with a training loop of its own behind the trainer port.

The script runs in a thread and hands over wherever a batch is due, and at each `run.step`. The trainer takes the gradients from there;
merged gradients are applied while the thread waits. A restarted worker runs the script from its beginning, without the batches
before its checkpoint, and restores the registered state where the first batch is due again.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ephemeron.config.typed import build, plain
from ephemeron.errors import JobError
from ephemeron.runs.metrics import EvaluationSums, Metrics, MetricSum, means
from ephemeron.training.task.eager import eager_optimizers
from ephemeron.training.task.evaluation import is_plain_sum
from ephemeron.training.task.outputs import Outputs
from ephemeron.training.task.script import Run, clip
from ephemeron.training.task.script_batches import LoaderBatches, Part, Share
from ephemeron.training.task.script_state import Registered
from ephemeron.training.task.staleness import OwnGradient, ProvisionalSteps
from ephemeron.training.task.state_codec import pack, unpack
from ephemeron.training.task.tensors import to_arrays
from ephemeron.training.tensors import Arrays
from ephemeron.training.worker.trainers.flat_parameters import FlatParameters
from ephemeron.training.worker.trainers.script_thread import Failed, ScriptEnded, ScriptThread
from ephemeron.training.worker.trainers.torch_state import RandomGenerators, RandomState
from ephemeron.training.worker.trainers.trainer import TrainingStep
from ephemeron.user_code import raised_by


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptState:
    """Plain values of a `ScriptTrainer`'s state."""

    iteration: int = 0
    """Next iteration that the script computes."""
    objects: Mapping[str, object] = field(default_factory=dict)
    """States of the registered objects. See `Registered.state`."""
    own: object = ()
    """Own gradients of these. See `ProvisionalSteps.state`."""
    pending: object = ()
    """Updates that are computed and not applied."""
    random: RandomGenerators | None = None
    """None: the state before the first batch, on every rank."""


@dataclass(frozen=True, slots=True)
class _Due:
    """The script asks for a batch."""

    iteration: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """An optimiser's step that waits for the merged gradient."""

    optimizer: str
    settings: Sequence[Mapping[str, Any]]
    """Learning rate and further options of each parameter group when `run.step` was called."""
    clip_norm: float | None
    clip_value: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Stepped:
    """The script has called `run.step`."""

    update: _Update
    loss: float
    samples: int
    weight: float
    """Number of things that the loss is a mean over."""
    summed: bool
    """Whether the loss is a sum, not a mean."""
    metrics: Mapping[str, float]


class FunctionRun(Run):
    """A run as the script of a function sees it. See `Run`."""

    _loads_in_processes = False

    def __init__(self, *, seed: int, share: Share, epoch_length: int, iterations: int, thread: ScriptThread) -> None:
        super().__init__(seed=seed, share=share)
        self._length, self._iterations, self._thread = epoch_length, iterations, thread
        self.outputs = Outputs()
        self._seen: dict[str, MetricSum] = {}
        """Of what was logged, what an iteration has reported."""
        self.first = 0
        """Iteration from which the script computes; earlier ones are skipped."""

    @property
    def output_dir(self) -> Path:
        return self.outputs.folder

    @property
    def registered(self) -> Registered:
        """The registered objects."""
        return self._registered

    def take_logged(self) -> EvaluationSums:
        """What was logged outside of iterations since the last call."""
        sums, self._logged, self._seen = self._logged, {}, {}
        return EvaluationSums(1 if sums else 0, sums)

    def logged_since(self) -> dict[str, float]:
        """Means logged outside of iterations since the last call of this method. They stay for the next evaluation."""
        new = {name: found for name, found in self._logged.items() if found is not None and self._seen.get(name) is not found}
        self._seen |= new
        return {name: total / terms for name, (total, terms) in new.items() if terms}

    def _skips(self, epoch: int) -> bool:
        end = (epoch + 1) * self._length
        return end <= self.first and end < self._iterations

    def _epoch(self, batches: LoaderBatches, epoch: int) -> Iterator[Any]:
        if self._skips(epoch):
            return
        self.epoch = epoch
        if (epoch + 1) * self._length > self._iterations:
            raise JobError(
                f"the script begins epoch {epoch + 1}, and its trial had {self._iterations // self._length}",
                remedy="let the number of epochs depend on the script's arguments alone",
            )
        batches.draw(epoch)
        parts: Iterator[Part] | None = None
        for number in range(self._length):
            t = epoch * self._length + number
            if t >= self.first:
                self._thread.report(_Due(t))
            if t < self.first:
                continue
            if parts is None:
                parts = batches.parts(epoch, number)
            part = next(parts, None)
            if part is None:
                raise JobError(
                    f"epoch {epoch + 1} has {number} batches, and the first had {self._length} in the trial",
                    remedy="let every epoch have the same number of batches",
                )
            self.iteration = t
            yield self._given(part)
            self._check_stepped()
        if parts is not None and next(parts, None) is not None:
            raise JobError(
                f"epoch {epoch + 1} has more batches than the {self._length} of the first in the trial",
                remedy="let every epoch have the same number of batches",
            )
        if self.first == self._iterations == (epoch + 1) * self._length:
            self._thread.report(_Due(self._iterations))

    def _step(
        self,
        name: str,
        optimizer: torch.optim.Optimizer,
        loss: torch.Tensor | float,
        part: Part,
        weight: float | None,
        clip_norm: float | None,
        clip_value: float | None,
        metrics: Mapping[str, float],
    ) -> None:
        settings = [{k: copy.copy(v) for k, v in g.items() if k != "params"} for g in optimizer.param_groups]
        update = _Update(optimizer=name, settings=settings, clip_norm=clip_norm, clip_value=clip_value)
        counted = part.samples if weight is None else weight * bool(part.samples)
        value = float(loss.detach()) if isinstance(loss, torch.Tensor) else float(loss)
        summed = weight is None and is_plain_sum(loss)
        if summed:
            value /= max(1, part.samples)
        self._thread.report(_Stepped(update=update, loss=value, samples=part.samples, weight=counted, summed=summed, metrics=metrics))


class ScriptTrainer:
    """See `Trainer`.

    Args:
        file: the script.
        arguments: of the script.
        folders: of the user's code, the script's first.
        share: of this rank.
        epoch_length: iterations of an epoch.
        iterations: of the whole run.
        seed: of the job.
        rank_seed: of this rank's random numbers from the first batch on.
        provisional: whether gradients are computed after provisional steps for versions that are not applied yet.
    """

    initial_first = False

    def __init__(
        self,
        file: Path,
        arguments: Sequence[str],
        folders: Sequence[Path],
        *,
        share: Share,
        epoch_length: int,
        iterations: int,
        seed: int,
        rank_seed: int,
        provisional: bool = False,
    ) -> None:
        self._thread = ScriptThread(file, arguments, folders)
        self._run = FunctionRun(seed=seed, share=share, epoch_length=epoch_length, iterations=iterations, thread=self._thread)
        self._name, self._iterations, self._next = file.name, iterations, 0
        self._pending: deque[_Update] = deque()
        self._random = RandomState(seed % 2**63)
        self._at: object = None
        try:
            self._go()
            self._until(0)
        except BaseException:
            self.close()
            raise
        if share.rank:  # rank 0 goes on with the script's own numbers, as one worker does
            self._random = RandomState(rank_seed)
        self._flat = FlatParameters([p for _, p in self._run.registered.parameters()])
        self.size, self.dtype = self._flat.size, self._flat.dtype
        optimizers = [o for o in self._run.registered.objects.values() if isinstance(o, torch.optim.Optimizer)]
        self._own = ProvisionalSteps(self._flat.parameters, optimizers, self._step_provisionally) if provisional else None

    # -- turns --------------------------------------------------------------------------------------------

    def _go(self) -> None:
        with self._random.in_use():
            self._at = self._thread.go(self._run)
        if isinstance(self._at, Failed):
            error = self._at.error
            raised_by(error).add_note(f"rank {self._run.rank}, iteration {self._next} of {self._name}")
            if isinstance(exit := raised_by(error), SystemExit):
                raise JobError(f"{self._name} ended with exit code {exit.code}", remedy="see its output") from exit
            raise error

    def _until(self, iteration: int) -> None:
        """Lets the script run until the batch of an iteration is due."""
        while not (isinstance(self._at, _Due) and self._at.iteration == iteration):
            if isinstance(self._at, _Due) and self._at.iteration > iteration:
                raise JobError(
                    f"{self._name} left a loop over run.steps before iteration {iteration}", remedy="let each loop come to its last batch"
                )
            if isinstance(self._at, ScriptEnded):
                raise JobError(
                    f"{self._name} ended before iteration {iteration} of {self._iterations}"
                    if iteration
                    else f"{self._name} ended without a loop over run.steps",
                    remedy="write `for batch in run.steps(loader):` with run.step(optimizer, loss), and let it come to its end",
                )
            self._go()

    # -- training -----------------------------------------------------------------------------------------

    def compute(self, iteration: int) -> TrainingStep:
        self._until(iteration)
        between = self._run.logged_since()
        with self._own.taken() if self._own is not None else nullcontext():
            self._flat.clear()
            self._go()
        step = self._at
        if not isinstance(step, _Stepped):
            raise JobError(
                f"{self._name} left the batch of iteration {iteration} without run.step",
                remedy="call run.step(optimizer, loss) once for each batch",
            )
        self._pending.append(step.update)
        self._next = iteration + 1
        alone, took_part = self._run.world == 1, step.samples > 0
        plain = step.weight > 0 and (alone or step.summed)  # a total weight of 0 leaves the sum of the vectors
        vector = self._flat.gather(1.0 if plain else step.weight, took_part=took_part)
        if self._own is not None:
            grads = [p.grad if took_part else None for p in self._flat.parameters]
            parts = tuple(None if g is None else g.clone() if step.weight else torch.zeros_like(g) for g in grads)
            self._own.computed(OwnGradient(iteration, iteration, parts))
        self._flat.clear()
        return TrainingStep(
            vector,
            step.samples,
            step.loss if step.weight else 0.0,
            weight=1.0 if alone else 0.0 if step.summed else step.weight,
            metrics={**between, **step.metrics} if step.weight else between,
            terms=step.weight,
        )

    def apply(self, mean: np.ndarray) -> None:
        self._flat.scatter(mean)
        if self._own is not None:
            self._own.applied(self._next - len(self._pending))
        with self._random.in_use():
            self._step(self._pending.popleft())
        self._flat.clear()

    def _step(self, update: _Update) -> None:
        optimizer = self._run.registered.objects[update.optimizer]
        with eager_optimizers(), _with_settings(optimizer, update.settings):
            clip(self._flat.parameters, update.clip_norm, update.clip_value)
            optimizer.step()

    def _step_provisionally(self, iteration: int | None) -> None:
        """Does the update of an iteration whose version is not applied, with the gradients that are in place."""
        assert iteration is not None
        self._step(self._pending[iteration - (self._next - len(self._pending))])

    def parameters(self) -> np.ndarray:
        return self._flat.values()

    def set_parameters(self, vector: np.ndarray) -> None:
        raise NotImplementedError("runs in several regions refuse scripts before the launch")

    # -- evaluation ---------------------------------------------------------------------------------------

    def evaluate(self) -> EvaluationSums:
        if self._next < self._iterations:
            self._until(self._next)
        else:
            while not isinstance(self._at, ScriptEnded):
                self._go()
        return self._run.take_logged()

    def metrics(self, parts: Sequence[EvaluationSums]) -> Metrics:
        return means(parts)

    def take_metrics(self, metrics: Metrics) -> None:
        pass

    # -- state --------------------------------------------------------------------------------------------

    def weights(self) -> tuple[Arrays, Mapping[str, object]]:
        arrays, bf16 = to_arrays(self._run.registered.weights())
        return arrays, {"bf16": bf16} if bf16 else {}

    def state(self) -> tuple[Arrays, Mapping[str, object]]:
        if self._next < self._iterations:
            self._until(self._next)  # code between two batches belongs to the iteration before it
        arrays: Arrays = {}
        objects = self._run.registered.state(arrays)
        pending = pack([[u.optimizer, list(u.settings), u.clip_norm, u.clip_value] for u in self._pending], "p", arrays)
        own = pack([] if self._own is None else self._own.state(), "g", arrays)
        random = self._random.save(arrays)
        arrays |= self.files()
        state = ScriptState(iteration=self._next, objects=objects, own=own, pending=pending, random=random)
        return arrays, plain(state)

    def load(self, arrays: Arrays, meta: Mapping[str, object], *, shared: bool = False) -> None:
        state = build(ScriptState, meta, where="state of the script")
        self._run.first = self._next = state.iteration
        self._until(state.iteration)
        self._run.registered.load(state.objects, arrays)
        if state.random is None:
            return
        self._run.take_logged()  # by code between skipped epochs
        self._pending = deque(
            _Update(optimizer=name, settings=settings, clip_norm=norm, clip_value=value)
            for name, settings, norm, value in unpack(state.pending, arrays)
        )
        if self._own is not None:
            self._own.load(unpack(state.own, arrays))
        self._run.outputs.load(arrays)  # a new generation goes on with the files of rank 0
        if not shared:
            self._random.restore(arrays, state.random)

    shares_after_compute = False  # what stands behind `run.step` runs after the update

    def private_state(self) -> tuple[Arrays, Mapping[str, object]]:
        if self._next < self._iterations:
            self._until(self._next)
        arrays: Arrays = {}
        objects = self._run.registered.private_state(arrays)
        random = self._random.save(arrays)
        arrays |= self.files()
        return arrays, plain(ScriptState(iteration=self._next, objects=objects, random=random))

    def files(self) -> Arrays:
        """See `WritesFiles`."""
        return self._run.outputs.files()

    @property
    def private_nbytes(self) -> int:
        return sum(b.nbytes for module in self._run.registered.modules.values() for b in module.buffers())

    def load_private(self, arrays: Arrays, meta: Mapping[str, object]) -> None:
        state = build(ScriptState, meta, where="private state of the script")
        assert state.random is not None
        self._run.registered.load_private(state.objects, arrays)
        self._run.outputs.load(arrays)
        self._random.restore(arrays, state.random)

    def close(self) -> None:
        self._thread.close()


@contextmanager
def _with_settings(optimizer: torch.optim.Optimizer, settings: Sequence[Mapping[str, Any]]) -> Iterator[None]:
    """An optimiser with the settings of an earlier iteration, where they differ: an update may be applied after later ones."""
    later = []
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        later.append({name: group[name] for name, value in own.items() if not _same(group[name], value)})
        group.update({name: own[name] for name in later[-1]})
    yield
    for group, own in zip(optimizer.param_groups, later, strict=True):
        group.update(own)


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor) or isinstance(b, torch.Tensor):
        return isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) and torch.equal(a, b)
    return bool(a == b)
