"""Objects that a script has registered: what its checkpoints hold, and whose parameters are exchanged."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from ephemeron.errors import JobError
from ephemeron.training.task.eager import eager_optimizers
from ephemeron.training.task.state_codec import pack, unpack
from ephemeron.training.task.tensors import Arrays, named_tensors, to_arrays, to_tensor


@runtime_checkable
class Stateful(Protocol):
    """An object that can save and restore its state, such as an optimiser."""

    def state_dict(self) -> Any: ...
    def load_state_dict(self, state: Any) -> Any: ...


class Registered:
    """Registered objects by name."""

    def __init__(self) -> None:
        self.objects: dict[str, Any] = {}
        self._parameters: list[tuple[str, nn.Parameter]] = []

    def add(self, objects: Mapping[str, object]) -> None:
        """Adds objects.

        Raises:
            JobError: one has no state that can be saved, or its name is taken.
        """
        for name, value in objects.items():
            if not isinstance(value, (Stateful, torch.Generator)):
                raise JobError(
                    f"run.register({name}=…) got a {type(value).__name__}, which has no state_dict()",
                    remedy="register objects with state_dict() and load_state_dict()",
                )
            if name in self.objects and self.objects[name] is not value:
                raise JobError(f"run.register({name}=…) was called with another object before", remedy="use another name")
            self.objects[name] = value
        self._parameters = []

    @property
    def modules(self) -> dict[str, nn.Module]:
        """Registered modules by name."""
        return {name: value for name, value in self.objects.items() if isinstance(value, nn.Module)}

    def parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Trainable parameters of all modules when this is first asked, tied ones once.

        Raises:
            JobError: there are none.
        """
        if not self._parameters:
            self._parameters = self._trainable()
        return self._parameters

    def _trainable(self) -> list[tuple[str, nn.Parameter]]:
        if not self.modules:
            raise JobError("no model is registered", remedy="call run.register(model=model, optimizer=optimizer)")
        seen: set[int] = set()
        found = []
        for prefix, module in self._prefixed():
            for name, p in module.named_parameters():
                if p.requires_grad and id(p) not in seen:
                    seen.add(id(p))
                    found.append((prefix + name, p))
        if not found:
            raise JobError("the registered model has no trainable parameter", remedy="leave requires_grad of some True")
        if any(p.is_complex() for _, p in found):
            raise JobError(
                "a parameter is complex, and functions exchange real numbers only",
                remedy="keep real and imaginary parts in one real parameter",
            )
        return found

    def name_of(self, value: object) -> str | None:
        """Name under which an object is registered."""
        return next((name for name, each in self.objects.items() if each is value), None)

    def check(self, optimizer: object) -> str:
        """The name of an optimiser whose parameters are all registered.

        Raises:
            JobError: names what is not registered.
        """
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise JobError(
                f"run.step got a {type(optimizer).__name__} as optimizer",
                remedy="call run.step(optimizer, loss) in place of optimizer.step()",
            )
        name = self.name_of(optimizer)
        if name is None:
            raise JobError(
                f"run.step got an optimizer ({type(optimizer).__name__}) that is not registered",
                remedy="call run.register(optimizer=optimizer) before the loop",
            )
        own = {id(p) for _, p in self.parameters()}
        for group in optimizer.param_groups:
            if any(p.requires_grad and id(p) not in own for p in group["params"]):
                raise JobError(
                    f"optimizer {name!r} has a parameter that is in no registered model",
                    remedy="call run.register(model=model) with the module that holds it",
                )
        return name

    def tensors(self) -> dict[str, torch.Tensor]:
        """Trained parameters and all buffers. Frozen parameters are what the script makes them."""
        return {
            f"{name}/{key}": tensor
            for name, module in self.modules.items()
            for key, tensor in named_tensors(module)
            if not isinstance(tensor, nn.Parameter) or tensor.requires_grad
        }

    def state(self, arrays: Arrays) -> Mapping[str, object]:
        """States of all objects as plain values; their tensors are added to `arrays`."""
        return self._saved(self.tensors(), self.objects, arrays)

    def private_state(self, arrays: Arrays) -> Mapping[str, object]:
        """Like `state`, without trained parameters and optimisers, which are alike on all ranks that apply the same updates."""
        buffers = {name: t for name, t in self.tensors().items() if not isinstance(t, nn.Parameter)}
        own = {name: o for name, o in self.objects.items() if not isinstance(o, torch.optim.Optimizer)}
        return self._saved(buffers, own, arrays)

    @staticmethod
    def _saved(tensors: Mapping[str, torch.Tensor], objects: Mapping[str, object], arrays: Arrays) -> Mapping[str, object]:
        found, bf16 = to_arrays({f"w/{name}": t for name, t in tensors.items()})
        arrays |= found
        with eager_optimizers():
            others = {name: _state_of(o) for name, o in objects.items() if not isinstance(o, nn.Module)}
        return {"bf16": bf16, "objects": pack(others, "o", arrays)}

    def load(self, packed: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Restores what `state` returned.

        Raises:
            JobError: the registered objects are others.
        """
        self._restore(self.tensors(), packed, arrays)

    def load_private(self, packed: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        """Restores what `private_state` returned."""
        buffers = {name: t for name, t in self.tensors().items() if not isinstance(t, nn.Parameter)}
        self._restore(buffers, packed, arrays)

    def _restore(self, tensors: Mapping[str, torch.Tensor], packed: Mapping[str, Any], arrays: Mapping[str, Any]) -> None:
        bf16 = frozenset(packed["bf16"])
        with torch.no_grad():
            for name, tensor in tensors.items():
                if f"w/{name}" not in arrays:
                    raise JobError(
                        f"the checkpoint does not hold {name}, which the script has registered",
                        remedy="register the same objects on every start",
                    )
                tensor.copy_(to_tensor(arrays[f"w/{name}"], f"w/{name}" in bf16))
        held = unpack(packed["objects"], arrays)
        with eager_optimizers():
            for name, state in held.items():
                value = self.objects.get(name)
                if value is None:
                    raise JobError(
                        f"the checkpoint holds {name!r}, which the script has not registered",
                        remedy="register the same objects on every start",
                    )
                _load(value, state)

    def weights(self) -> dict[str, torch.Tensor]:
        """The `state_dict()` of the model, or of all of them, with their names in front."""
        return {
            prefix + name: t
            for prefix, module in self._prefixed()
            for name, t in module.state_dict().items()
            if isinstance(t, torch.Tensor)
        }

    def _prefixed(self) -> Iterator[tuple[str, nn.Module]]:
        models = [name for name, module in self.modules.items() if next(module.parameters(), None) is not None]
        return (("" if [name] == models else f"{name}.", module) for name, module in self.modules.items())


def _state_of(value: Any) -> Any:
    return value.get_state() if isinstance(value, torch.Generator) else value.state_dict()


def _load(value: Any, state: Any) -> None:
    if isinstance(value, torch.Generator):
        value.set_state(state)
    else:
        value.load_state_dict(state)
