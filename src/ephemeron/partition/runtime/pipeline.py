"""`Pipeline`: training of a split model, micro-batch by micro-batch, on several devices at once.

    sgd = partial(torch.optim.SGD, lr=0.1)
    with Pipeline(parts, schedule=plan.schedule, optimizer=sgd, loss=cross_entropy, where="processes") as pipe:
        for inputs, targets in batches:
            step = pipe.step(inputs, targets)
        pipe.save(folder)
        model.load_state_dict(pipe.state_dict())

A step changes parameters as one step of the unsplit model with gradients accumulated over the same micro-batches, up to rounding.
Without statistics over a batch (BatchNorm) it is as one step over the whole batch. Gradients are never stale: all passes end
before any update.

Checkpoints of a pipeline as two safetensors files: the original model's state, and the optimisers' state. No pickle.

    folder/model.safetensors        all names of the original's state_dict(), including those of tied parameters
    folder/optimizer.safetensors    state by original parameter name; numbers and options in the metadata

Neither contains stages, so a checkpoint can be loaded into another placement or without a pipeline. Both contain the iteration;
files of different iterations (after a crash between the two) are refused.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Literal, Self

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from ephemeron.errors import JobError
from ephemeron.partition.costs.links import Pair
from ephemeron.partition.costs.optimizer import MakeOptimizer
from ephemeron.partition.costs.peer import Throttle
from ephemeron.partition.runtime.backend import Backend, DeviceState, InProcessBackend, StepResult, load_stage
from ephemeron.partition.runtime.boundaries import stage_boundaries
from ephemeron.partition.runtime.checking import check_stages
from ephemeron.partition.runtime.device import MicroBatchInput
from ephemeron.partition.runtime.execution import MicroBatchLoss
from ephemeron.partition.runtime.micro_batches import Loss, Metrics, MicroBatch, Training, Weigh, cut
from ephemeron.partition.runtime.optimizer_step import Options
from ephemeron.partition.schedule_simulator.schedule import ReplaySpan, Schedule
from ephemeron.partition.tracing.split import ModelSplit

_log = logging.getLogger(__name__)

Transport = Literal["shared", "unix", "tcp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineStepResult:
    """Result of one iteration."""

    iteration: int
    loss: float
    """Loss of the whole batch."""
    metrics: Mapping[str, float]
    """Metrics of the whole batch."""
    took_s: float
    """Seconds from the call until all devices have updated."""
    spans: tuple[ReplaySpan, ...]
    """Spans of devices and links by start, in seconds since the call. A transfer has the names of both stages."""
    results: tuple[Any, ...]
    """Results of the model by micro-batch; empty unless requested."""

    @property
    def busy_s(self) -> dict[str | tuple[str, str], float]:
        """Seconds by device and link."""
        made: dict[str | tuple[str, str], float] = {}
        for span in self.spans:
            made[span.resource] = made.get(span.resource, 0.0) + span.end_s - span.start_s
        return made


class Pipeline:
    """Training of a split model.

    Args:
        split: the stages. With `where="here"` they are trained in place; else `state_dict` and `close` update their state.
        schedule: kind and number of micro-batches, and recomputation; a batch with fewer samples has fewer micro-batches.
        optimizer: makes an optimiser over given parameters; called once for each device, so it must treat parameters
            independently.
        loss: (result, targets) -> mean over samples; runs on the device of the last stage.
        where: `here`: all devices in this process. `processes`: each in a process of this machine, forked from this
            one, with one thread for computing.
        devices: PyTorch device by name of the device; by default `cpu`.
        metrics: (result, targets) -> means over samples by name.
        weigh: weight of a micro-batch by its targets; None: its samples.
        seed: of random steps.
        links: added delays by (source, target), for calibration runs; `processes` only.
        transport: between processes.
        timeout_s: limit of a step; `processes` only.
        check: whether copies of the stages and of the whole model are compared first, see `check_stages`; takes memory for both
            and the time of some iterations of the example batch.

    Raises:
        JobError: devices or links that the split does not have, or a combination that cannot run.
        TraceMismatch: the stages do not train as the whole model does.
    """

    def __init__(
        self,
        split: ModelSplit,
        *,
        schedule: Schedule,
        optimizer: MakeOptimizer,
        loss: Loss,
        where: Literal["here", "processes"] = "here",
        devices: Mapping[str, str | torch.device] | None = None,
        metrics: Metrics | None = None,
        weigh: Weigh | None = None,
        seed: int = 0,
        links: Mapping[Pair, Throttle] | None = None,
        transport: Transport = "shared",
        timeout_s: float = 600.0,
        check: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.split, self.schedule, self.seed = split, schedule, seed
        self._weigh, self._clock = weigh, clock
        self._boundaries = stage_boundaries(split)
        self._last = self._boundaries[-1].device
        self.iteration = 0
        self._ended = ""
        training = Training(schedule=schedule, optimizer=optimizer, loss=loss, metrics=metrics, seed=seed)
        at = _placed(split, devices or {})
        _check_links(split, links or {}, where)
        if check:
            check_stages(split, schedule=schedule, seed=seed)
        self._backend: Backend
        if where == "here":
            self._backend = InProcessBackend(split, training, at=at, clock=clock)
        elif where == "processes":
            from ephemeron.partition.runtime.process_backend import ProcessBackend

            self._backend = ProcessBackend(split, training, at=at, throttles=dict(links or {}), transport=transport, timeout_s=timeout_s)
        else:
            raise JobError(f"where = {where!r} is not known", remedy="use here or processes")

    def step(
        self, inputs: Any, targets: Any = None, *, kwargs: Mapping[str, Any] | None = None, results: bool = False
    ) -> PipelineStepResult:
        """One iteration: forward and backward passes of all micro-batches, and one step of the optimisers.

        Args:
            inputs: the model's argument, or a tuple of them.
            targets: of the loss; nested tensors are divided like inputs.
            kwargs: of the model.
            results: whether the model's results are returned.

        Raises:
            JobError: a batch that the model does not take, or a closed pipeline.
            StageFailed: a stage raised or its process died; the pipeline has ended.
        """
        self._check_open()
        begun_s = self._clock()
        args = inputs if isinstance(inputs, tuple) else (inputs,)
        parts = cut(args, kwargs or {}, targets, self.schedule.micro_batches, weigh=self._weigh)
        feeds, given = self._feeds(parts)
        with self._ending():
            done = self._backend.step(self.iteration, feeds, results=results)
        took_s = self._clock() - begun_s
        self.iteration += 1
        scored = [done[self._last].scored[m] for m in range(len(parts))]
        return PipelineStepResult(
            iteration=self.iteration - 1,
            loss=sum(s.loss * p.weight for s, p in zip(scored, parts, strict=True)),
            metrics=_mean(scored, parts),
            took_s=took_s,
            spans=_from(begun_s, done),
            results=tuple(self.split.traced.result({**g, **s.results}) for g, s in zip(given, scored, strict=True)) if results else (),
        )

    @property
    def processes(self) -> dict[str, int]:
        """Process id by device; empty if all devices are in this process."""
        return self._backend.processes

    def set_options(self, **options: Any) -> None:
        """Set options of all optimisers, e.g. `lr=0.01`.

        Raises:
            JobError: an optimiser has no such option.
        """
        self._check_open()
        with self._ending():
            self._backend.set_options(options)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Parameters and buffers by the names of the original model, which loads them strictly."""
        self._gather()
        return {n: t.detach().cpu().clone() for n, t in self.split.state().items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Load a state of the original model; optimisers restart.

        Raises:
            JobError: names or shapes are not the model's; names the first.
        """
        self._take(state, PipelineOptimizerState(states={}, options={}))

    def save(self, folder: str | Path) -> None:
        """Write model, optimisers and iteration; see `pipeline`."""
        states = self._gather()
        optimizer: dict[str, Mapping[str, Any]] = {}
        options: dict[str, Options] = {}
        for s in states.values():
            optimizer |= {n: v for n, v in s.optimizer.items() if n not in optimizer}
            options |= {n: v for n, v in s.options.items() if n not in options}
        save(
            Path(folder),
            PipelineCheckpoint(
                iteration=self.iteration,
                seed=self.seed,
                model=self.split.state(),
                optimizer=PipelineOptimizerState(states=optimizer, options=options),
            ),
        )

    def load(self, folder: str | Path) -> None:
        """Continue from a checkpoint of this or another placement; the next step is the one after the checkpoint, with the same random
        draws.

        Raises:
            JobError: the checkpoint is damaged, of another model, or has another seed.
        """
        found = load(Path(folder))
        if found.seed != self.seed:
            raise JobError(
                f"{folder} was trained with seed {found.seed}, and this pipeline draws by seed {self.seed}",
                remedy=f"make the pipeline with seed={found.seed}",
            )
        self._take(found.model, found.optimizer)
        self.iteration = found.iteration
        _log.info("loaded %s, iteration %d", folder, self.iteration)

    def close(self) -> None:
        """Update the state of the split's stages, and end all processes."""
        try:
            if not self._ended:
                self._gather()
        finally:
            self._ended = self._ended or "was closed"
            self._backend.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None:
            self._ended = self._ended or "was closed"
        self.close()

    def _feeds(self, parts: Sequence[MicroBatch]) -> tuple[dict[str, list[MicroBatchInput]], list[dict[str, object]]]:
        wanted: dict[str, set[str]] = {}
        for b in self._boundaries:
            wanted.setdefault(b.device, set()).update(b.given)
        fed = {b.device for b in self._boundaries if b.fed}
        feeds: dict[str, list[MicroBatchInput]] = {d: [] for d in wanted}
        every = []
        for m, part in enumerate(parts):
            given = self.split.traced.named_inputs(part.args, part.kwargs)
            given |= self.split.numbers(given)
            every.append(given)
            for device, names in wanted.items():
                last = device == self._last
                feeds[device].append(
                    MicroBatchInput(
                        iteration=self.iteration,
                        micro_batch=m,
                        values={n: given[n] for n in sorted(names)},
                        targets=part.targets if last else None,
                        weight=part.weight,
                        wanted=device in fed,
                    )
                )
        return feeds, every

    def _gather(self) -> dict[str, DeviceState]:
        self._check_open()
        with self._ending():
            states = self._backend.fetch()
        for s in states.values():
            for i, values in s.stages.items():
                load_stage(self.split.stages[i], values)
        return states

    def _take(self, state: Mapping[str, torch.Tensor], optimizer: PipelineOptimizerState) -> None:
        self._check_open()
        known = self.split.state()
        for name in (*known, *state):
            if name not in known or name not in state or known[name].shape != state[name].shape:
                here = tuple(known[name].shape) if name in known else "absent"
                there = tuple(state[name].shape) if name in state else "absent"
                raise JobError(
                    f"load: {name} is {there} in the state and {here} in the model", remedy="give a state of the model that was split"
                )
        states: dict[str, DeviceState] = {}
        for device in self.split.devices:
            own = [s for s in self.split.stages if s.spec.device == device]
            trained = {n for n, p in self.split.parameters(device) if p.requires_grad}
            states[device] = DeviceState(
                stages={s.spec.index: {n: state[n] for n in s.state_dict()} for s in own},
                optimizer={n: v for n, v in optimizer.states.items() if n in trained},
                options={n: v for n, v in optimizer.options.items() if n in trained},
            )
        with self._ending():
            self._backend.put(states)

    def _check_open(self) -> None:
        if self._ended:
            raise JobError(f"this pipeline {self._ended}", remedy="make another, and load() the last checkpoint")

    def _ending(self) -> _Ending:
        return _Ending(self)


class _Ending:
    """Context in which an exception ends the pipeline and its processes, because half an iteration leaves no state to continue from.

    A `JobError` does not: it is raised before an iteration begins.
    """

    def __init__(self, pipe: Pipeline) -> None:
        self._pipe = pipe

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and not isinstance(error, JobError):
            _log.warning("pipeline ends in iteration %d: %s", self._pipe.iteration, error)
            self._pipe._ended = f"has ended ({type(error).__name__}: {str(error)[:200]})"
            self._pipe._backend.close()


def _mean(scored: Sequence[MicroBatchLoss], parts: Sequence[MicroBatch]) -> dict[str, float]:
    made: dict[str, float] = {}
    for s, p in zip(scored, parts, strict=True):
        for name, value in s.metrics.items():
            made[name] = made.get(name, 0.0) + value * p.weight
    return made


def _from(begun_s: float, done: Mapping[str, StepResult]) -> tuple[ReplaySpan, ...]:
    spans = [replace(s, start_s=s.start_s - begun_s, end_s=s.end_s - begun_s) for d in done.values() for s in d.spans]
    return tuple(sorted(spans, key=lambda s: (s.start_s, s.end_s)))


def _placed(split: ModelSplit, devices: Mapping[str, str | torch.device]) -> dict[str, torch.device]:
    for name in devices:
        if name not in split.devices:
            raise JobError(f"devices has {name!r}, which has no stage", remedy=f"use {', '.join(split.devices)}")
    return {d: torch.device(devices.get(d, "cpu")) for d in split.devices}


def _check_links(split: ModelSplit, links: Mapping[Pair, Throttle], where: str) -> None:
    if links and where == "here":
        raise JobError("links have delays between processes only", remedy='leave them out, or use where="processes"')
    for source, target in links:
        if source == target or source not in split.devices or target not in split.devices:
            raise JobError(f"links has {source} → {target}, which is no pair of devices", remedy=f"use {', '.join(split.devices)}")


# -- checkpoints of a pipeline as two safetensors files -----------------------------------------------------------


MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
_FORMAT = "ephemeron-pipeline-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptimizerState:
    """Optimiser state of all devices, by original parameter name."""

    states: Mapping[str, Mapping[str, Any]]
    """Tensors and plain values."""
    options: Mapping[str, Options]


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineCheckpoint:
    """State from which training continues."""

    iteration: int
    """Next iteration."""
    seed: int
    model: Mapping[str, torch.Tensor]
    optimizer: PipelineOptimizerState


def save(folder: Path, checkpoint: PipelineCheckpoint) -> None:
    """Write both files, each atomically."""
    folder.mkdir(parents=True, exist_ok=True)
    about = {"format": _FORMAT, "iteration": str(checkpoint.iteration), "seed": str(checkpoint.seed)}
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, dict[str, object]] = {}
    for name, state in checkpoint.optimizer.states.items():
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                tensors[json.dumps([name, key])] = value
            else:
                plain.setdefault(name, {})[key] = value
    _write(folder / MODEL, checkpoint.model, about)
    words = {"plain": json.dumps(plain), "options": json.dumps(_grouped(checkpoint.optimizer.options))}
    _write(folder / OPTIMIZER, tensors, {**about, **words})


def load(folder: Path) -> PipelineCheckpoint:
    """Read both files.

    Raises:
        JobError: a file is absent, damaged, no checkpoint of a pipeline, or of another iteration than the other; names it.
    """
    model, about = _read(folder / MODEL)
    tensors, of_optimizer = _read(folder / OPTIMIZER)
    if about["iteration"] != of_optimizer["iteration"]:
        raise JobError(
            f"{folder}: the model is of iteration {about['iteration']}, its optimiser of {of_optimizer['iteration']}",
            remedy="load an older checkpoint that is whole",
        )
    states: dict[str, dict[str, object]] = {n: dict(s) for n, s in json.loads(of_optimizer["plain"]).items()}
    for key, t in tensors.items():
        name, what = json.loads(key)
        states.setdefault(name, {})[what] = t
    options = {n: o for names, o in json.loads(of_optimizer["options"]) for n in names}
    return PipelineCheckpoint(
        iteration=int(about["iteration"]),
        seed=int(about["seed"]),
        model=model,
        optimizer=PipelineOptimizerState(states=states, options=options),
    )


def _grouped(options: Mapping[str, Options]) -> list[tuple[list[str], Options]]:
    """Names grouped by equal options; most parameters have the same."""
    groups: dict[str, tuple[list[str], Options]] = {}
    for name, own in options.items():
        groups.setdefault(json.dumps(own, sort_keys=True), ([], own))[0].append(name)
    return list(groups.values())


def _write(path: Path, tensors: Mapping[str, torch.Tensor], about: dict[str, str]) -> None:
    """Write tensors; tied names get a copy each, because the format does not share memory."""
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        save_file({n: t.detach().to("cpu").clone().contiguous() for n, t in tensors.items()}, new, metadata=about)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def _read(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        with safe_open(path, framework="pt") as file:
            about = dict(file.metadata() or {})
            tensors = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118 - not a mapping
    except (OSError, SafetensorError) as e:
        raise JobError(f"{path} cannot be read: {e}", remedy="give a folder that save() has written") from e
    if about.get("format") != _FORMAT:
        raise JobError(f"{path} is no checkpoint of a pipeline", remedy="give a folder that save() has written")
    return tensors, about
