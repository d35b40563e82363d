"""Optimiser of one device, and its state by names of the original model.

A parameter on several devices has a copy and an optimiser state on each. Gradients are summed in the same order everywhere, so all
copies stay bit-identical.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import nn

from ephemeron.errors import JobError
from ephemeron.partition.costs.optimizer import MakeOptimizer

Options: TypeAlias = Mapping[str, object]
"""Options of an optimiser, e.g. the learning rate."""
_PLAIN = (bool, int, float, str, type(None))


class OptimizerShard:
    """Parameters of one device with their optimiser.

    Args:
        device: its name.
        parameters: by name, each once.
        shared: devices by parameter, for parameters on several devices; in the same order on all devices.
        make: makes the optimiser; not called if no parameter is trained.
    """

    def __init__(
        self, device: str, parameters: Mapping[str, nn.Parameter], shared: Mapping[str, Sequence[str]], make: MakeOptimizer
    ) -> None:
        self.device = device
        self.parameters = {n: p for n, p in parameters.items() if p.requires_grad}
        self.shared = {n: tuple(d) for n, d in shared.items() if device in d}
        self._names: dict[torch.Tensor, str] = {p: n for n, p in self.parameters.items()}
        self._make = make
        self.optimizer: torch.optim.Optimizer | None = None
        self.restart()

    @property
    def partners(self) -> tuple[str, ...]:
        """Devices that share a parameter with this one."""
        return tuple(dict.fromkeys(d for devices in self.shared.values() for d in devices if d != self.device))

    def restart(self) -> None:
        """Replace the optimiser by a new one without state."""
        self.optimizer = self._make(list(self.parameters.values())) if self.parameters else None

    def clear(self) -> None:
        """Drop all gradients."""
        for p in self.parameters.values():
            p.grad = None

    def shared_gradients(self) -> dict[str, dict[str, torch.Tensor]]:
        """This device's gradients of shared parameters, by device that needs them."""
        made: dict[str, dict[str, torch.Tensor]] = {d: {} for d in self.partners}
        for name, devices in self.shared.items():
            grad = self.parameters[name].grad
            if grad is not None:
                for d in devices:
                    if d != self.device:
                        made[d][name] = grad
        return made

    def sum_shared(self, received: Mapping[str, Mapping[str, torch.Tensor]]) -> None:
        """Set gradients of shared parameters to the sum over all devices, last device first, as `ModelSplit.sum_shared_gradients`.

        Args:
            received: gradients by device and name.
        """
        sums: dict[str, torch.Tensor] = {}
        for name, devices in self.shared.items():
            own = self.parameters[name].grad
            found = [own if d == self.device else received[d].get(name) for d in reversed(devices)]
            grads = [g for g in found if g is not None]
            if grads:
                total = grads[0].to(self.parameters[name].device, copy=True)
                for g in grads[1:]:
                    total += g.to(total.device)
                sums[name] = total
        for name, total in sums.items():
            self.parameters[name].grad = total

    def step(self) -> None:
        """Step of the optimiser."""
        if self.optimizer is not None:
            self.optimizer.step()

    def set_options(self, options: Mapping[str, Any]) -> None:
        """Set options of all groups, e.g. `lr`.

        Raises:
            JobError: the optimiser has no such option.
        """
        for group in self.optimizer.param_groups if self.optimizer is not None else ():
            for name, value in options.items():
                if name == "params" or name not in group:
                    known = ", ".join(sorted(n for n in group if n != "params"))
                    raise JobError(f"the optimiser has no option {name!r}", remedy=f"use one of {known}")
                group[name] = value

    def state(self) -> tuple[dict[str, dict[str, object]], dict[str, Options]]:
        """State and options, both by parameter."""
        if self.optimizer is None:
            return {}, {}
        states = {self._names[p]: dict(s) for p, s in self.optimizer.state.items() if p in self._names}
        options: dict[str, Options] = {}
        for group in self.optimizer.param_groups:
            own = {k: _plain(v) for k, v in group.items() if k != "params"}
            options.update({self._names[p]: own for p in group["params"] if p in self._names})
        return states, options

    def load(self, states: Mapping[str, Mapping[str, Any]], options: Mapping[str, Options]) -> None:
        """Load states and options as `state` returns them, for parameters of this device.

        Raises:
            JobError: a trained parameter has no options.
        """
        if self.optimizer is None:
            return
        document = self.optimizer.state_dict()
        found: dict[int, dict[str, object]] = {}
        for group, numbered in zip(self.optimizer.param_groups, document["param_groups"], strict=True):
            for p, number in zip(group["params"], numbered["params"], strict=True):
                name = self._names[p]
                if name not in options:
                    raise JobError(
                        f"the optimiser's state has nothing for parameter {name}",
                        remedy="load the state of the same model with the same frozen parameters",
                    )
                numbered.update({k: _as_tuple(v) for k, v in options[name].items() if k in numbered})
                if name in states:
                    found[number] = {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in states[name].items()}
        self.optimizer.load_state_dict({"state": found, "param_groups": document["param_groups"]})


def _plain(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.item()
    if isinstance(value, (tuple, list)):
        return [_plain(v) for v in value]
    if isinstance(value, _PLAIN):
        return value
    raise JobError(
        f"the optimiser has an option of the type {type(value).__name__}, which cannot be saved",
        remedy="use numbers, text and lists of them",
    )


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
