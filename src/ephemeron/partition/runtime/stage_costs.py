"""Measured times of whole stages, and the graph of stages for the schedule simulator.

Sums over operators ignore what PyTorch saves by running them one after another, and contention between devices of one machine for
caches, memory and sibling threads. So stages are measured as they will run, at the size of a micro-batch: alone, for schedules in
which one device computes at a time; or all at once, each in its own process without waits, for schedules that overlap. The number
of micro-batches in flight is that of the pipeline, and inputs and gradients are in fresh memory like received messages, because a
stage is faster if its inputs are still in caches.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from random import Random
from statistics import median
from typing import Any

import torch

from ephemeron.errors import JobError
from ephemeron.partition.costs.optimizer import MakeOptimizer
from ephemeron.partition.graph.graph import Graph, Node, Tensor
from ephemeron.partition.runtime.boundaries import boundary_bytes, results_of, stage_boundaries
from ephemeron.partition.runtime.dispatcher import in_flight
from ephemeron.partition.runtime.execution import LossSpec, StageRun
from ephemeron.partition.runtime.micro_batches import Loss
from ephemeron.partition.schedule_simulator.schedule import Schedule, Task
from ephemeron.partition.schedule_simulator.simulator import Takes
from ephemeron.partition.tracing.split import ModelSplit

_WARMUP = 2
_LIMIT_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Seconds of each stage, by number."""

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...]
    """One step of the optimiser of the stage's device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSamples:
    """All measured samples."""

    rows: tuple[tuple[tuple[float, float, float], ...], ...]
    """By stage and repetition: forward, backward, update."""

    def times(self, condensed: Callable[[Sequence[float]], float] = median) -> StageTimes:
        """One figure per stage and pass: medians; with `min` the undisturbed time, with `fmean` the mean of many in a row."""
        by = [[condensed(column) for column in zip(*own, strict=True)] for own in self.rows]
        return StageTimes(forward_s=tuple(b[0] for b in by), backward_s=tuple(b[1] for b in by), update_s=tuple(b[2] for b in by))

    def drawn(self, rng: Random) -> Takes:
        """Times for `replay(takes=...)` on `stage_graph`: each pass takes the time of a random sample. A pipeline whose passes vary is slower
        than one in which all take the mean, because late passes delay others."""
        rows = {f"stage {i}": own for i, own in enumerate(self.rows)}

        def takes(task: Task, micro_batch: int, seconds: float) -> float:
            what, direction = task
            return rng.choice(rows[what])[direction == "backward"] if what in rows else seconds

        return takes


def measure_stages(
    split: ModelSplit,
    inputs: Any,
    targets: Any = None,
    *,
    loss: Loss,
    optimizer: MakeOptimizer,
    kwargs: Mapping[str, Any] | None = None,
    together: bool = True,
    schedule: Schedule | None = None,
    repeats: int = 9,
    clock: Callable[[], float] = time.perf_counter,
) -> StageSamples:
    """Times of every stage with true inputs and gradients on this machine's processor; states do not change.

    Args:
        split: one stage on each device.
        inputs, kwargs, targets: one micro-batch; times are for its size.
        loss: of the last stage.
        optimizer: makes an optimiser for each device.
        together: all stages at the same time, each in a process with one thread; else one after the other.
        schedule: determines the micro-batches in flight of each stage; None: one.
        repeats: number of measured passes.
        clock: seconds.

    Raises:
        JobError: several stages on one device, or too few repetitions.
    """
    if len(split.devices) != len(split.stages):
        raise JobError("measure_stages: a device has several stages", remedy="measure a pipeline, one stage on each")
    if repeats < 3:
        raise JobError(f"measure_stages: repeats = {repeats} gives no median", remedy="use 3 or more")
    args = inputs if isinstance(inputs, tuple) else (inputs,)
    devices = [s.spec.device for s in split.stages]
    flight = in_flight(schedule, devices) if schedule is not None else dict.fromkeys(devices, 1)
    works = [
        _work(s, flight[d], targets, optimizer, clock)
        for s, d in zip(_staged(split, args, kwargs or {}, targets, loss), devices, strict=True)
    ]
    groups = [works] if together else [[w] for w in works]
    return StageSamples(rows=tuple(rows for group in groups for rows in _measured(group, repeats)))


def stage_graph(split: ModelSplit, times: StageTimes, *, micro_batches: int = 1, kind: str = "cpu") -> Graph:
    """Graph for `replay` with stages as nodes named `stage 0`, …; the placement is `stage_placement`.

    Args:
        split: traced with the whole batch as its example, which gives the bytes.
        times: of a micro-batch.
        micro_batches: the simulator divides by it, so times are multiplied.
        kind: of the devices.
    """
    nodes = tuple(
        Node(
            name=f"stage {i}", forward_s={kind: micro_batches * times.forward_s[i]}, backward_s={kind: micro_batches * times.backward_s[i]}
        )
        for i in range(len(split.stages))
    )
    tensors = tuple(
        Tensor(name=f"{u} → {v}", producer=f"stage {u}", consumers=(f"stage {v}",), nbytes=f, gradient_nbytes=b)
        for (u, v), (f, b) in boundary_bytes(split).items()
    )
    return Graph(name="stages", nodes=nodes, tensors=tensors, source="stages measured as a whole")


def stage_placement(split: ModelSplit) -> dict[str, str]:
    """Device by node of `stage_graph`."""
    return {f"stage {s.spec.index}": s.spec.device for s in split.stages}


Work = Callable[[], tuple[float, float, float]]


@dataclass(frozen=True, slots=True)
class _StageInput:
    """A stage with its inputs and gradients."""

    run: StageRun
    values: Mapping[str, Any]
    gradients: Mapping[str, torch.Tensor]


def _staged(split: ModelSplit, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Any, loss: Loss) -> list[_StageInput]:
    """Stages with inputs and gradients, from one pass through all of them."""
    store: dict[str, object] = dict(split.traced.named_inputs(tuple(args), kwargs))
    store |= split.numbers(store)
    every = stage_boundaries(split)
    loss_spec = LossSpec(traced=split.traced, results=results_of(split), loss=loss, metrics=None)
    runs = [
        StageRun(s, b, loss_spec=loss_spec if b.last else None, seed=0, recompute=False) for s, b in zip(split.stages, every, strict=True)
    ]
    read = [{n: store.get(n) for n in (*b.given, *(n for ns in b.received.values() for n in ns))} for b in every]
    state = [{n: t.clone() for n, t in s.state_dict().items()} for s in split.stages]
    for i, run in enumerate(runs):
        read[i] = {n: store[n] for n in read[i]}
        store |= run.forward(0, 0, read[i], targets=targets)[0]
    gradients: list[dict[str, torch.Tensor]] = [{} for _ in runs]
    for i in reversed(range(len(runs))):
        for name, g in runs[i].backward(0, gradients[i]).items():
            maker = next(s for s, names in every[i].received.items() if name in names)
            before = gradients[maker].get(name)
            gradients[maker][name] = g if before is None else before + g
    for s, before_state in zip(split.stages, state, strict=True):
        for p in s.parameters():
            p.grad = None
        for n, t in s.state_dict().items():
            t.copy_(before_state[n])
    return [_StageInput(run, read[i], gradients[i]) for i, run in enumerate(runs)]


def _work(staged: _StageInput, flight: int, targets: Any, make: MakeOptimizer, clock: Callable[[], float]) -> Work:
    """Function that times one repetition; it runs in a forked process, on a copy of the stage."""
    run = staged.run
    trained = [p for p in run.stage.parameters() if p.requires_grad]
    optimizers: list[torch.optim.Optimizer] = []

    def work() -> tuple[float, float, float]:
        if trained and not optimizers:
            optimizers.append(make(trained))
        for m in range(flight - 1):
            run.forward(0, m, _clone_values(staged.values), targets=targets)
        values = _clone_values(staged.values)
        gradients = {n: g.clone() for n, g in staged.gradients.items()}
        begun = clock()
        run.forward(0, flight - 1, values, targets=targets)
        forward_s = clock() - begun
        begun = clock()
        run.backward(0, gradients)
        backward_s = clock() - begun
        for m in range(1, flight):
            run.backward(m, {n: g.clone() for n, g in staged.gradients.items()})
        begun = clock()
        for o in optimizers:
            o.step()
        return forward_s, backward_s, clock() - begun

    return work


def _clone_values(values: Mapping[str, object]) -> dict[str, object]:
    """Copies at other addresses, as received values have."""
    return {n: v.clone() if isinstance(v, torch.Tensor) else v for n, v in values.items()}


def _measured(group: Sequence[Work], repeats: int) -> list[tuple[tuple[float, float, float], ...]]:
    """Samples of works that run in a process each; all begin together, and run until the last has enough samples."""
    context = multiprocessing.get_context("fork")
    barrier, enough = context.Barrier(len(group)), context.Semaphore(0)
    ends, processes = [], []
    for work in group:
        mine, theirs = context.Pipe(duplex=False)
        p = context.Process(target=_repeat, args=(work, repeats, len(group), barrier, enough, theirs), daemon=True)
        p.start()
        theirs.close()
        ends.append(mine)
        processes.append(p)
    try:
        found = []
        for i, end in enumerate(ends):
            if not end.poll(_LIMIT_S):
                raise JobError(f"measure_stages: stage {i} of these took more than {_LIMIT_S:g} s", remedy="use less")
            try:
                found.append(end.recv())
            except EOFError:
                raise JobError(f"measure_stages: stage {i} failed; its process says why", remedy="try one step of the pipeline") from None
        return found
    finally:
        for p in processes:
            p.kill()
            p.join()


def _repeat(work: Work, repeats: int, others: int, barrier: Any, enough: Any, tell: Connection) -> None:
    torch.set_num_threads(1)
    for _ in range(_WARMUP):
        work()
    barrier.wait(_LIMIT_S)
    rows = [work() for _ in range(repeats)]
    enough.release()
    while enough.get_value() < others:  # keep the load up while slower ones are measured
        work()
    tell.send(tuple(rows))
