"""Comparison of a split model with the original: training steps of both, over real stage boundaries.

`tracing.check` compares the whole traced model and cannot see losses at a boundary: if a gradient does not come back, all stages
upstream stay untrained without an error. So the code that will train the stages runs some steps of them, with the schedule's
micro-batches and recomputation, in this process. Compared with the whole model are results, loss, which parameters have gradients,
their values, and all parameters and buffers after each update.

This trains two copies of the model. Transports between processes and the arithmetic of other devices are not compared.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_structure

from ephemeron.errors import JobError, TraceMismatch
from ephemeron.partition.runtime.backend import InProcessBackend
from ephemeron.partition.runtime.boundaries import stage_boundaries
from ephemeron.partition.runtime.device import MicroBatchInput
from ephemeron.partition.runtime.micro_batches import MicroBatch, Training, cut
from ephemeron.partition.schedule_simulator.schedule import Schedule
from ephemeron.partition.tracing.check import difference, fresh, mean_square, tolerance
from ephemeron.partition.tracing.split import ModelSplit
from ephemeron.partition.tracing.traced import Traced
from ephemeron.user_code import line_of

_log = logging.getLogger(__name__)

Values = dict[str, torch.Tensor]
_RATE = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class StagesCheck:
    """Result of a comparison without differences."""

    steps: int
    micro_batches: int
    """Number in each step; fewer than the schedule's if the example has fewer samples, or was traced for a fixed size."""
    largest_difference: float
    """Largest difference of any value, relative to the largest value of its tensor (at least 1)."""
    reference: str
    """`original`, or `traced` if none was given or the model draws random numbers."""


def check_stages(split: ModelSplit, *, schedule: Schedule, original: nn.Module | None = None, steps: int = 2, seed: int = 0) -> StagesCheck:
    """Comparison of stages with the whole model by training copies of both on the traced example batch.

    Args:
        split: the stages; they do not change.
        schedule: for kind, micro-batches and recomputation.
        original: the model that was traced. Stages draw random numbers by name and the original does not. If it draws any, the
            traced model, which was compared with it, is the reference.
        steps: number of SGD steps.
        seed: of random steps.

    Raises:
        TraceMismatch: they differ; names value, step and difference.
    """
    random = any(effect.random for effect in split.traced.observation.side_effects.values())
    reference = split.traced if original is None or random else original
    for count in dict.fromkeys((schedule.micro_batches, 1)):
        parts = _parts(split, count)
        made = _Comparison(split, reference, schedule, parts, seed)
        try:
            expected = made.whole_step(0)
        except Exception:
            if len(parts) == 1:
                raise
            continue  # it takes no batch so small, e.g. batch statistics of one sample
        worst = made.compare(0, expected)
        for step in range(1, steps):
            worst = max(worst, made.compare(step, made.whole_step(step)))
        _log.info("%d stages train as the %s model: largest difference %.2g", len(split.stages), made.name, worst)
        return StagesCheck(
            steps=steps, micro_batches=len(parts), largest_difference=worst, reference="traced" if reference is split.traced else "original"
        )
    raise AssertionError("the example is one batch at least")


def _parts(split: ModelSplit, count: int) -> tuple[MicroBatch, ...]:
    """Micro-batches of the example, or one if the model takes no other size."""
    example = split.traced.example
    args, kwargs = fresh((example.args, dict(example.kwargs)))
    if count > 1:
        try:
            parts = cut(args, kwargs, None, count)
            for part in parts:
                split.traced.named_inputs(part.args, part.kwargs)
            return parts
        except JobError:
            pass
    return cut(args, kwargs, None, 1)


class _Comparison:
    """Copies of a whole model and of its stages, stepped in turn."""

    def __init__(self, split: ModelSplit, reference: nn.Module, schedule: Schedule, parts: Sequence[MicroBatch], seed: int) -> None:
        traced = split.traced
        self.parts, self.seed = parts, seed
        self.whole = copy.deepcopy(reference).train()
        self.stages = ModelSplit(traced, copy.deepcopy(split.stages), split.shared)
        _load(self.whole, self.stages)
        self.name = "traced" if reference is traced else "original"
        loss = traced.example.loss or mean_square
        self.training = Training(
            schedule=replace(schedule, micro_batches=len(parts)),
            optimizer=partial(torch.optim.SGD, lr=_RATE),
            loss=lambda result, _: loss(result),
            seed=seed,
        )
        at = next((t.device for t in (*traced.parameters(), *traced.buffers())), torch.device("cpu"))
        self.backend = InProcessBackend(self.stages, self.training, at=dict.fromkeys(split.devices, at), clock=time.monotonic)

    def whole_step(self, step: int) -> Values:
        """Values of the reference after one step over the same micro-batches."""
        model, found, total = self.whole, dict[str, torch.Tensor](), 0.0
        model.zero_grad(set_to_none=True)
        for m, part in enumerate(self.parts):
            if isinstance(model, Traced):
                model.draw_from(self.seed, iteration=step, micro_batch=m)
            args, kwargs = fresh((part.args, part.kwargs))
            result = model(*args, **kwargs)
            value = self.training.loss(result, None) * part.weight
            total += float(value.detach())
            if value.requires_grad:
                torch.autograd.backward([value])
            found |= _outputs(result, m)
        trained = [p for p in model.parameters() if p.requires_grad]
        if trained:
            self.training.optimizer(trained).step()
        return found | {"loss": torch.tensor(total, dtype=torch.float64)} | _states(model)

    def compare(self, step: int, expected: Values) -> float:
        """Largest difference of this step.

        Raises:
            TraceMismatch: a difference is more than rounding, or the stages fail.
        """
        count = len(self.stages.stages)
        place = f"step {step + 1} over the boundaries of {count} stages"
        try:
            got = self._staged_step(step)
        except Exception as e:
            raise TraceMismatch(f"{place} fails, and the {self.name} model does not: {line_of(e)}") from e
        worst = 0.0
        for name in (*expected, *(n for n in got if n not in expected)):
            if name in expected and name in got:
                gap = difference(expected[name], got[name])
                worst = max(worst, gap)
                if gap <= tolerance(expected[name].dtype):
                    continue
                what = f"{name} differs by {gap:.2g}"
            else:
                what = f"{name} is there only in the {self.name if name in expected else 'cut'} model"
            raise TraceMismatch(f"{place}: {what}; {self._crossing()}", remedy="put its operators on one device")
        return worst

    def _staged_step(self, step: int) -> Values:
        stages = self.stages
        feeds: dict[str, list[MicroBatchInput]] = {d: [] for d in stages.devices}
        given_by_part = []
        for m, part in enumerate(self.parts):
            given = stages.traced.named_inputs(*fresh((part.args, part.kwargs)))
            given |= stages.numbers(given)
            given_by_part.append(given)
            for own in feeds.values():
                own.append(MicroBatchInput(iteration=step, micro_batch=m, values=given, weight=part.weight))
        done = self.backend.step(step, feeds, results=True)
        scored = done[stage_boundaries(stages)[-1].device].scored
        total = sum(scored[m].loss * part.weight for m, part in enumerate(self.parts))
        found: Values = {"loss": torch.tensor(total, dtype=torch.float64)}
        for m, given in enumerate(given_by_part):
            found |= _outputs(stages.traced.result({**given, **scored[m].results}), m)
        for stage in stages.stages:
            found |= _states(stage)
        return found

    def _crossing(self) -> str:
        seen = self.stages.traced.observation.values
        found = [
            f"{p.name} ({seen[p.name].dtype or p.kind}) into stage {s.spec.index}"
            for s in self.stages.stages
            for p in s.spec.inputs
            if p.source is not None
        ]
        return f"values that cross: {', '.join(found[:6])}{', …' if len(found) > 6 else ''}"


def _outputs(result: Any, m: int) -> Values:
    found = {f"output {i} of micro-batch {m}": t for i, t in enumerate(tree_leaves(result)) if isinstance(t, torch.Tensor)}
    nesting = str(tree_structure(result)).encode()
    return {f"nesting of the result of micro-batch {m}": torch.tensor(list(nesting)), **found}


def _states(model: nn.Module) -> Values:
    found: Values = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            found[f"gradient of {name}"] = p.grad
    found |= {f"parameter {n}": p.detach() for n, p in model.named_parameters()}
    return found | {f"buffer {n}": b for n, b in model.named_buffers()}


def _load(whole: nn.Module, stages: ModelSplit) -> None:
    """Copy the stages' state into the whole model: they may have been trained since the split."""
    own = {**dict(whole.named_parameters()), **dict(whole.named_buffers())}
    changing = {n for effect in stages.traced.observation.side_effects.values() for n in effect.changed_states}
    seen: set[str] = set()
    with torch.no_grad():
        for stage in stages.stages:
            for name, t in (*stage.named_parameters(), *stage.named_buffers()):
                if name in own and (name not in seen or name in changing):
                    own[name].copy_(t)
                    seen.add(name)
