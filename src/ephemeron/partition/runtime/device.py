"""One device's part of an iteration: received messages, passes, sent messages. Independent of processes and transports.

    begin → { feed | accept | run_next } until `computed` → exchange shared gradients → update

`send` takes messages for stages on other devices; the caller passes messages for this device's stages to `accept`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ephemeron.errors import StageFailed
from ephemeron.partition.runtime.boundaries import StageBoundary, results_of, stage_boundaries
from ephemeron.partition.runtime.dispatcher import Dispatcher, Operation, in_flight
from ephemeron.partition.runtime.execution import LossSpec, MicroBatchLoss, StageRun, written_inputs
from ephemeron.partition.runtime.micro_batches import Training
from ephemeron.partition.runtime.optimizer_step import OptimizerShard
from ephemeron.partition.schedule_simulator.schedule import Pass, ReplaySpan
from ephemeron.partition.tracing.split import ModelSplit
from ephemeron.partition.tracing.traced_module import TracedModule
from ephemeron.user_code import guarded, line_of, raised_by


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMessage:
    """Values for one pass of one stage: tensors, or gradients, that another stage made."""

    iteration: int
    source: int
    """Stage; -1: the caller."""
    target: int
    direction: Pass
    micro_batch: int
    values: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatchInput:
    """Inputs and targets of one micro-batch for a device."""

    iteration: int
    micro_batch: int
    values: Mapping[str, Any]
    targets: Any = None
    weight: float = 1.0
    wanted: bool = True
    """Whether any stage of the device reads inputs or targets."""


class DeviceRun:
    """All stages of one device.

    Args:
        split: the model; only this device's stages are used.
        device: name.
        training: loss, optimiser and schedule.
        send: takes messages for stages of other devices; does not wait.
        clock: seconds.
        at: PyTorch device of the tensors.
    """

    def __init__(
        self,
        split: ModelSplit,
        device: str,
        training: Training,
        *,
        send: Callable[[StageMessage], None],
        clock: Callable[[], float],
        at: torch.device,
    ) -> None:
        self.device, self.training, self.at = device, training, at
        self._send, self._clock = send, clock
        every = stage_boundaries(split)
        self._stage_devices = [b.device for b in every]
        self._boundaries = {b.stage: b for b in every if b.device == device}
        self._in_flight = in_flight(training.schedule, self._stage_devices)[device]
        self._runs: dict[int, StageRun] = {}
        for number, boundary in self._boundaries.items():
            stage = split.stages[number]
            stage.to(at).train()
            loss_spec = LossSpec(traced=split.traced, results=results_of(split), loss=training.loss, metrics=training.metrics)
            self._runs[number] = StageRun(
                stage,
                boundary,
                changed_inputs=written_inputs(stage, split.traced),
                loss_spec=loss_spec if boundary.last else None,
                seed=training.seed,
                recompute=training.schedule.recompute and self._in_flight > 1,
            )
        for run in self._runs.values():
            run.sum_apart([p for p in run.stage.parameters() if p.requires_grad and self._readers(p) > 1])
        self.updates = OptimizerShard(device, dict(split.parameters(device)), split.shared, training.optimizer)
        self._dispatcher = Dispatcher((), schedule=training.schedule, in_flight=1)
        self._received: dict[Operation, dict[int, Mapping[str, Any]]] = {}
        self._targets: dict[int, tuple[Any, float]] = {}
        self.iteration = -1
        self.at_work: Operation | None = None
        self.scored: dict[int, MicroBatchLoss] = {}
        self.spans: list[ReplaySpan] = []

    @property
    def stages(self) -> tuple[int, ...]:
        """Numbers of this device's stages."""
        return tuple(self._runs)

    @property
    def partners(self) -> tuple[str, ...]:
        """Devices that share parameters with this one."""
        return self.updates.partners

    @property
    def computed(self) -> bool:
        """Whether all passes of the iteration are done."""
        return self._dispatcher.done

    @property
    def ready(self) -> bool:
        """Whether `run_next` would run a pass."""
        return self._dispatcher.ready

    @property
    def under_way(self) -> int:
        """Micro-batches in flight of the stage that has most."""
        return max(run.under_way for run in self._runs.values())

    def begin(self, iteration: int, micro_batches: int) -> None:
        """Begin an iteration with at most as many micro-batches as the schedule's."""
        schedule = replace(self.training.schedule, micro_batches=micro_batches)
        flight = in_flight(schedule, self._stage_devices)[self.device]
        self._dispatcher = Dispatcher(self.stages, schedule=schedule, in_flight=flight)
        self._received.clear()
        self._targets.clear()
        self.scored, self.spans, self.iteration = {}, [], iteration
        for run in self._runs.values():
            run.forget()
        self.updates.clear()
        for number, boundary in self._boundaries.items():
            if not boundary.received and not boundary.fed:
                for m in range(micro_batches):
                    self._dispatcher.arrived(Operation(stage=number, direction="forward", micro_batch=m))

    def feed(self, feed: MicroBatchInput) -> None:
        """Accept inputs and targets for all stages that read some."""
        self._targets[feed.micro_batch] = (feed.targets, feed.weight)
        for number, boundary in self._boundaries.items():
            if boundary.fed:
                own = {n: feed.values[n] for n in boundary.given}
                self._deliver(number, "forward", feed.micro_batch, -1, own)

    def accept(self, message: StageMessage) -> None:
        """Accept values from another stage."""
        self._deliver(message.target, message.direction, message.micro_batch, message.source, message.values)

    def run_next(self) -> bool:
        """Run one pass if one is ready; False: none is.

        Raises:
            StageFailed: the pass raised; names it and, if known, the operator.
        """
        operation = self._dispatcher.next()
        if operation is None:
            return False
        begun_s = self._clock()
        try:
            with guarded():
                (self._forward if operation.direction == "forward" else self._backward)(operation)
        except Exception as e:
            raise self.failure(e, operation) from e
        self.spans.append(
            ReplaySpan(
                resource=self.device,
                what=f"stage {operation.stage}",
                direction=operation.direction,
                micro_batch=operation.micro_batch,
                start_s=begun_s,
                end_s=self._clock(),
            )
        )
        self._dispatcher.ended(operation)
        return True

    def shared_gradients(self) -> dict[str, dict[str, torch.Tensor]]:
        """Gradients of shared parameters after all passes, by device that needs them."""
        for number in reversed(self.stages):
            self._runs[number].add_own_sums()
        return self.updates.shared_gradients()

    def update(self, received: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Step of the optimiser.

        Args:
            received: gradients of shared parameters, by partner.

        Raises:
            StageFailed: the optimiser raised.
        """
        begun_s = self._clock()
        try:
            self.updates.sum_shared(received)
            with guarded():
                self.updates.step()
        except Exception as e:
            raise self.failure(e, None) from e
        self.spans.append(
            ReplaySpan(resource=self.device, what="update", direction="backward", micro_batch=0, start_s=begun_s, end_s=self._clock())
        )

    def failure(self, error: Exception, operation: Operation | None) -> StageFailed:
        """`StageFailed` of an exception on this device."""
        text = line_of(error)
        return StageFailed(
            text if operation is not None else f"in the optimiser's step: {text}",
            device=self.device,
            iteration=self.iteration,
            operation=operation,
            operator=_innermost_operator(raised_by(error).__traceback__),
        )

    def _forward(self, o: Operation) -> None:
        boundary, parts = self._boundaries[o.stage], self._received.pop(o, {})
        values = {n: self._here(v) for part in parts.values() for n, v in part.items()}
        targets, weight = self._targets.pop(o.micro_batch, (None, 1.0)) if boundary.last else (None, 1.0)
        made, scored = self._runs[o.stage].forward(self.iteration, o.micro_batch, values, targets=self._nested_here(targets), weight=weight)
        if scored is not None:
            self.scored[o.micro_batch] = scored
        for target, names in boundary.sent.items():
            self._give(o, target, {n: made[n] for n in names})
        if not boundary.sent:
            self._dispatcher.arrived(replace(o, direction="backward"))

    def _backward(self, o: Operation) -> None:
        boundary, parts = self._boundaries[o.stage], self._received.pop(o, {})
        gradients: dict[str, torch.Tensor] = {}
        for source in sorted(parts, reverse=True):
            for name, value in parts[source].items():
                g = self._here(value)
                gradients[name] = gradients[name] + g if name in gradients else g
        found = self._runs[o.stage].backward(o.micro_batch, gradients)
        for source, names in boundary.received.items():
            self._give(o, source, {n: found[n] for n in names if n in found})

    def _give(self, o: Operation, target: int, values: Mapping[str, Any]) -> None:
        if target in self._runs:
            self._deliver(target, o.direction, o.micro_batch, o.stage, values)
        else:
            self._send(
                StageMessage(
                    iteration=self.iteration, source=o.stage, target=target, direction=o.direction, micro_batch=o.micro_batch, values=values
                )
            )

    def _deliver(self, target: int, direction: Pass, micro_batch: int, source: int, values: Mapping[str, Any]) -> None:
        o = Operation(stage=target, direction=direction, micro_batch=micro_batch)
        parts = self._received.setdefault(o, {})
        parts[source] = values
        boundary = self._boundaries[target]
        wanted = len(boundary.received) + boundary.fed if direction == "forward" else len(boundary.sent)
        if len(parts) == wanted:
            self._dispatcher.arrived(o)

    def _here(self, value: Any) -> Any:
        return value.to(self.at) if isinstance(value, torch.Tensor) else value

    def _nested_here(self, targets: Any) -> Any:
        return targets if self.at.type == "cpu" else torch.utils._pytree.tree_map(self._here, targets)

    def _readers(self, p: nn.Parameter) -> int:
        return sum(any(p is q for q in run.stage.parameters()) for run in self._runs.values())


def devices_of(every: Sequence[StageBoundary]) -> tuple[str, ...]:
    """Devices in the order of their first stages."""
    return tuple(dict.fromkeys(b.device for b in every))


def _innermost_operator(trace: TracebackType | None) -> str:
    """Operator of the innermost step in a traceback; empty: none."""
    found = ""
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code is TracedModule.call_step.__code__:
            step = frame.f_locals["step"]
            found = f"{step.name} ({step.operator}{', in ' + step.origin if step.origin else ''})"
        trace = trace.tb_next
    return found
