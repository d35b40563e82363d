"""Backends of a pipeline: the interface, and a backend with all devices in this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ephemeron.partition.runtime.boundaries import stage_boundaries
from ephemeron.partition.runtime.device import DeviceRun, MicroBatchInput, StageMessage, devices_of
from ephemeron.partition.runtime.execution import MicroBatchLoss
from ephemeron.partition.runtime.micro_batches import Training
from ephemeron.partition.runtime.optimizer_step import Options
from ephemeron.partition.schedule_simulator.schedule import ReplaySpan
from ephemeron.partition.tracing.split import ModelSplit, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of one device's iteration."""

    scored: Mapping[int, MicroBatchLoss]
    """By micro-batch; empty but for the device of the last stage."""
    spans: Sequence[ReplaySpan]
    """Spans on the clock of the backend."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceState:
    """State of a device between iterations."""

    stages: Mapping[int, Mapping[str, torch.Tensor]]
    """Parameters and buffers by name, by stage."""
    optimizer: Mapping[str, Mapping[str, Any]]
    """State by parameter."""
    options: Mapping[str, Options]
    """Options of the optimiser, by parameter."""


class Backend(ABC):
    """Devices that train. Every method but `close` may raise `StageFailed`; then only `close` may be called."""

    @abstractmethod
    def step(self, iteration: int, feeds: Mapping[str, Sequence[MicroBatchInput]], *, results: bool) -> dict[str, StepResult]:
        """Result of one iteration by device.

        Args:
            iteration: number.
            feeds: inputs by device, one for every micro-batch in order.
            results: whether values of the model's result are returned.
        """

    @abstractmethod
    def fetch(self) -> dict[str, DeviceState]:
        """State by device; the caller owns it."""

    @abstractmethod
    def put(self, states: Mapping[str, DeviceState]) -> None:
        """Load states as `fetch` returns them; without options, a device restarts its optimiser."""

    @abstractmethod
    def set_options(self, options: Mapping[str, Any]) -> None:
        """Set options of all optimisers, e.g. `lr`."""

    @abstractmethod
    def close(self) -> None:
        """End all devices; may be called twice."""

    @property
    def processes(self) -> dict[str, int]:
        """Process id by device, if devices have processes of their own."""
        return {}


class InProcessBackend(Backend):
    """All devices in this process and thread. CUDA devices compute at the same time, because calls to them return
    immediately.

    Args:
        split: its stages are trained in place.
        training: loss, optimiser and schedule.
        at: PyTorch device by name of the device.
        clock: seconds; on CUDA, spans are those of the calls.
    """

    def __init__(self, split: ModelSplit, training: Training, *, at: Mapping[str, torch.device], clock: Callable[[], float]) -> None:
        self._split = split
        every = stage_boundaries(split)
        self._home = {b.stage: b.device for b in every}
        self._devices = {d: DeviceRun(split, d, training, send=self._send, clock=clock, at=at[d]) for d in devices_of(every)}

    def step(self, iteration: int, feeds: Mapping[str, Sequence[MicroBatchInput]], *, results: bool) -> dict[str, StepResult]:
        for name, device in self._devices.items():
            device.begin(iteration, len(feeds[name]))
        for name, device in self._devices.items():
            for feed in feeds[name]:
                device.feed(feed)
        while not all(d.computed for d in self._devices.values()):
            ran = [d.run_next() for d in self._devices.values()]  # one pass each, so that CUDA devices overlap
            if not any(ran):
                raise AssertionError("every device waits for another")
        shares = {name: device.shared_gradients() for name, device in self._devices.items()}
        for name, device in self._devices.items():
            device.update({other: shares[other][name] for other in device.partners})
        return {n: StepResult(scored=d.scored, spans=tuple(d.spans)) for n, d in self._devices.items()}

    def fetch(self) -> dict[str, DeviceState]:
        return {name: state_of(d, self._split.stages) for name, d in self._devices.items()}

    def put(self, states: Mapping[str, DeviceState]) -> None:
        for name, state in states.items():
            load_state(self._devices[name], self._split.stages, state)

    def set_options(self, options: Mapping[str, Any]) -> None:
        for device in self._devices.values():
            device.updates.set_options(options)

    def close(self) -> None:
        self._devices.clear()

    def _send(self, message: StageMessage) -> None:
        self._devices[self._home[message.target]].accept(message)


def state_of(device: DeviceRun, stages: Sequence[Stage]) -> DeviceState:
    """Copy of a device's state in main memory."""
    optimizer, options = device.updates.state()
    return DeviceState(
        stages={i: {n: _copy(t) for n, t in stages[i].state_dict().items()} for i in device.stages},
        optimizer={p: {k: _copy(v) for k, v in s.items()} for p, s in optimizer.items()},
        options=options,
    )


def load_state(device: DeviceRun, stages: Sequence[Stage], state: DeviceState) -> None:
    """Load a state into a device, in place."""
    for i, values in state.stages.items():
        load_stage(stages[i], values)
    if state.options:
        device.updates.load(state.optimizer, state.options)
    else:
        device.updates.restart()


def load_stage(stage: Stage, values: Mapping[str, torch.Tensor]) -> None:
    """Load parameters and buffers into a stage, in place."""
    with torch.no_grad():
        for name, t in stage.state_dict().items():
            t.copy_(values[name])


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, torch.Tensor) else value
