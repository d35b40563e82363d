"""A training loop of the user's own: `run = ephemeron.current()` in a script.

    run = ephemeron.current()
    run.register(model=model, optimizer=optimizer, scheduler=scheduler)
    for epoch in run.epochs(10):
        for inputs, targets in run.steps(loader):
            loss = functional.cross_entropy(model(inputs), targets)
            loss.backward()
            run.step(optimizer, loss)       # in place of optimizer.step() and optimizer.zero_grad()
            scheduler.step()

The loop stays the user's. `python script.py` runs it in one process, as below, without functions or a store. On functions,
`current()` is another `Run`, which exchanges gradients in `step` (`training.worker.script_trainer`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ephemeron.errors import JobError
from ephemeron.runs.metrics import MetricSum, counted
from ephemeron.training.task.evaluation import number_of, weight_of
from ephemeron.training.task.script_batches import LoaderBatches, Part, Share
from ephemeron.training.task.script_state import Registered


class Run:
    """A run of a script: here with one worker, in the script's own process.

    Args:
        seed: of the order of samples, and of their random numbers.
        share: of this worker.
    """

    def __init__(self, *, seed: int = 0, share: Share | None = None) -> None:
        self._seed, self._share = seed, Share() if share is None else share
        self._registered = Registered()
        self._loader: LoaderBatches | None = None
        self._begun = 0
        """Epochs whose loop over `steps` has begun."""
        self._loops = 0
        """Loops over `epochs` and `steps` that have not ended."""
        self._part: Part | None = None
        """Batch whose `step` is due."""
        self._logged: dict[str, MetricSum] = {}
        self._of_step: dict[str, float] = {}
        self.epoch = 0
        """Number of the epoch, from 0."""
        self.iteration = 0
        """Number of the iteration, from 0 over all epochs."""

    @property
    def rank(self) -> int:
        """Number of this worker, from 0."""
        return self._share.rank

    @property
    def world(self) -> int:
        """Number of workers."""
        return len(self._share.weights)

    @property
    def is_main(self) -> bool:
        """Whether this is worker 0."""
        return self.rank == 0

    @property
    def is_over(self) -> bool:
        """Whether its loops have ended."""
        return self._begun > 0 and self._loops == 0

    @property
    def output_dir(self) -> Path:
        """Folder for files that the script writes for its user, 64 MiB at most: `outputs` in the working folder.

        On functions each worker has its own, which is in its checkpoints. That of worker 0 is `outputs` in the run's folder at the end.
        """
        folder = Path("outputs").absolute()
        folder.mkdir(exist_ok=True)
        return folder

    def register(self, **objects: object) -> None:
        """Names the objects whose state belongs to the run: models, optimisers, schedulers, anything with `state_dict()`.

        Raises:
            JobError: an object has no `state_dict()`, or it is registered after the first batch.
        """
        if self._begun:
            raise JobError("run.register was called after the first batch", remedy="register before the loop")
        self._registered.add(objects)

    def epochs(self, count: int) -> Iterator[int]:
        """Numbers of epochs, 0 to `count` - 1, each with one loop over `steps`. A restarted worker skips whole epochs."""
        with self._looping():
            yield from self._epochs(count)

    def _epochs(self, count: int) -> Iterator[int]:
        first = self._begun
        for number in range(count):
            if self._skips(first + number):
                self._begun += 1
                continue
            yield number
            if self._begun != first + number + 1:
                raise JobError(
                    f"an epoch of run.epochs had {self._begun - first - number} loops over run.steps",
                    remedy="write one `for batch in run.steps(loader)` in each epoch",
                )

    def steps(self, loader: Iterable[Any], epochs: int | None = None, *, per_worker: bool = False) -> Iterator[Any]:
        """This worker's part of each batch. The loader's batch is the global batch.

        Args:
            loader: a `DataLoader`, or an iterable of the batches of an epoch.
            epochs: passes over the loader; None: one, in a loop over epochs.
            per_worker: the loader's batch is that of each worker, as in `DistributedDataParallel`.

        Raises:
            JobError: no model is registered, or a batch cannot be divided.
        """
        self._registered.parameters()
        if self._loader is None or self._loader.loader is not loader:
            self._loader = LoaderBatches(
                loader, seed=self._seed, share=self._share, per_worker=per_worker, processes=self._loads_in_processes
            )
        batches = self._loader
        with self._looping():
            for _ in range(1 if epochs is None else epochs):
                epoch = self._begun
                self._begun += 1
                yield from self._epoch(batches, epoch)

    def step(
        self,
        optimizer: torch.optim.Optimizer,
        loss: torch.Tensor | float,
        *,
        weight: float | None = None,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        **metrics: Any,
    ) -> None:
        """Ends an iteration: merges the gradients of all workers, clips them, steps the optimiser and clears gradients.

        Args:
            optimizer: a registered one.
            loss: mean over this worker's part of the batch, of which `backward` was called.
            weight: number of terms of that mean, if they are not the samples (such as tokens). 0: the gradient is zero.
            clip_norm: largest norm of the merged gradient of all parameters.
            clip_value: largest absolute value of an element of the merged gradient.
            metrics: further numbers of this iteration, means over the batch.

        Raises:
            JobError: the optimiser or one of its parameters is not registered, no batch is due, or the weight is no number from 0.
        """
        name = self._registered.check(optimizer)
        if self._part is None:
            raise JobError(
                "run.step was called twice for one batch, or outside of the loop over run.steps",
                remedy="call run.step once for each batch, after backward of all its parts; several optimisers in turn: write an ephemeron.Task",
            )
        numbers = {key: number_of(value, key, "run.step") for key, value in metrics.items()}
        weight = None if weight is None else weight_of(weight, "run.step")
        part, self._part = self._part, None
        self._step(name, optimizer, loss, part, weight, clip_norm, clip_value, {**self._of_step, **numbers})
        self._of_step = {}
        self.iteration += 1

    def log(self, **values: Any) -> None:
        """Notes numbers: between a batch and its `step`, of this iteration; else of the evaluation at this point of the run.

        A pair is a total and a number of terms, which are added up over the workers; single numbers are averaged.
        """
        for name, value in values.items():
            if self._part is not None:
                self._of_step[name] = number_of(value, name, "run.log")
            elif isinstance(value, (tuple, list)) and len(value) == 2:
                self._logged[name] = counted(*(number_of(each, name, "run.log") for each in value))
            else:
                self._logged[name] = (number_of(value, name, "run.log"), 1.0)

    # -- what a worker on functions does otherwise --------------------------------------------------------

    _loads_in_processes = True

    def _skips(self, epoch: int) -> bool:
        """Whether an epoch was finished before this worker was started."""
        return False

    def _epoch(self, batches: LoaderBatches, epoch: int) -> Iterator[Any]:
        batches.draw(epoch)
        self.epoch = epoch
        for part in batches.parts(epoch, 0):
            yield self._given(part)
            self._check_stepped()

    @contextmanager
    def _looping(self) -> Iterator[None]:
        self._loops += 1
        try:
            yield
        finally:
            self._loops -= 1

    def _given(self, part: Part) -> Any:
        self._part = part
        return part.data

    def _check_stepped(self) -> None:
        if self._part is not None:
            raise JobError(
                "a batch of run.steps was left without run.step",
                remedy="call run.step(optimizer, loss) once for each batch; to accumulate gradients, let the loader make the whole batch and "
                "call backward for parts of it",
            )

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
        parameters = [p for _, p in self._registered.parameters()]
        for p in parameters if weight == 0 else ():
            p.grad = None if p.grad is None else torch.zeros_like(p)
        clip(parameters, clip_norm, clip_value)
        optimizer.step()
        for p in parameters:
            p.grad = None


def clip(parameters: list[nn.Parameter], norm: float | None, value: float | None) -> None:
    """Clips gradients by value, then by norm."""
    if value is not None:
        nn.utils.clip_grad_value_(parameters, value)
    if norm is not None:
        nn.utils.clip_grad_norm_(parameters, norm)


_active: Run | None = None
_local: Run | None = None


def current() -> Run:
    """The run that this script is part of. Outside of functions: a run with one worker, in this process.

    There, a call after the loops of such a run begins another one, so that a cell of a notebook can be run again.
    """
    global _local
    if _active is not None:
        return _active
    if _local is None or _local.is_over:
        _local = Run()
    return _local


@contextmanager
def active(run: Run) -> Iterator[None]:
    """Context in which `current()` is `run`."""
    global _active
    before, _active = _active, run
    try:
        yield
    finally:
        _active = before
