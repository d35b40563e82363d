"""Observed effects of steps in one run: sizes, shared memory, changes in place, random draws.

They are observed and not inferred, because opaque modules and custom functions have no schema, and schemas of operators do not contain
updates of running statistics.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from ephemeron.partition.tracing.program import Ref, State, TracedStep, reads
from ephemeron.partition.tracing.traced_module import TracedModule

Kind = Literal["tensor", "number", "other"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """Properties of an input of the model or the result of a step."""

    kind: Kind
    """`number`: a size or other plain value. `other`: several tensors, or none."""
    nbytes: int = 0
    """Bytes of a tensor for the example batch."""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    needs_gradient: bool = False
    storage: int = -1
    """Number of the storage; values with the same number share memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SideEffects:
    """Side effects of a step."""

    changed: frozenset[int]
    """Storages changed in place."""
    changed_states: frozenset[str]
    """Changed parameters and buffers."""
    random: bool
    """Whether the step drew random numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Observed forward pass in training mode."""

    values: Mapping[str, Value]
    side_effects: Mapping[str, SideEffects]

    def __deepcopy__(self, memo: dict[int, Any]) -> Observation:
        return self


def observe(module: TracedModule, values: Mapping[str, Any]) -> Observation:
    """Observation of a model on an example batch; a copy runs.

    Args:
        module: the whole model.
        values: inputs by name.
    """
    clone = copy.deepcopy(module)
    watcher = _Watcher(clone)
    given = dict(values)
    watcher.keep(given)
    with torch.random.fork_rng(), watcher.watching():
        clone.run_steps(given)
    return Observation(values=watcher.finished(), side_effects=watcher.side_effects)


class _Watcher:
    def __init__(self, module: TracedModule) -> None:
        self.module = module
        self.values: dict[str, Value] = {}
        self.side_effects: dict[str, SideEffects] = {}
        self._alive: list[torch.Tensor] = []  # keeps addresses of storages unique
        self._tensors: dict[str, torch.Tensor] = {}
        self._numbers: dict[int, int] = {}

    def keep(self, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
            self._note(name, value)

    def finished(self) -> dict[str, Value]:
        """Values at the end of the run: a tensor without a gradient may have been changed in place by one with a gradient."""
        return {
            name: replace(v, needs_gradient=self._tensors[name].requires_grad) if name in self._tensors else v
            for name, v in self.values.items()
        }

    @contextmanager
    def watching(self) -> Iterator[None]:
        plain = self.module.call_step
        self.module.__dict__["call_step"] = lambda step, args, kwargs: self._seen(plain, step, args, kwargs)
        try:
            yield
        finally:
            del self.module.__dict__["call_step"]

    def _seen(self, plain: Any, step: TracedStep, args: tuple[Any, ...], kwargs: dict[str, object]) -> Any:
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        states = self._states(step)
        before = [t._version for t in tensors]
        states_before = {name: t._version for name, t in states.items()}
        # batch norm changes its running statistics without a version count
        buffers_before = {n: t.clone() for n, t in states.items() if not isinstance(t, nn.Parameter)}
        drawn = torch.random.get_rng_state()
        made = plain(step, args, kwargs)
        self.side_effects[step.name] = SideEffects(
            changed=frozenset(self._storage(t) for t, v in zip(tensors, before, strict=True) if t._version != v),
            changed_states=frozenset(
                n
                for n, t in states.items()
                if t._version != states_before[n] or (n in buffers_before and not torch.equal(t, buffers_before[n]))
            ),
            random=not torch.equal(drawn, torch.random.get_rng_state()),
        )
        self._note(step.name, made)
        return made

    def _note(self, name: str, made: Any) -> None:
        self.values[name] = self._value(made)
        if isinstance(made, torch.Tensor):
            self._tensors[name] = made

    def _states(self, step: TracedStep) -> dict[str, torch.Tensor]:
        found = {r.name: self.module.state(r.name) for r in reads(step) if isinstance(r, State)}
        if step.module is not None:
            found |= states_of_module(self.module.module_at(step.module), step.module)
        return found

    def _value(self, made: Any) -> Value:
        if isinstance(made, torch.Tensor):
            return Value(
                kind="tensor",
                nbytes=made.numel() * made.element_size(),
                shape=tuple(made.shape),
                dtype=str(made.dtype).removeprefix("torch."),
                needs_gradient=made.requires_grad,
                storage=self._storage(made),
            )
        for t in tree_leaves(made):
            if isinstance(t, torch.Tensor):
                self._alive.append(t)
        return Value(kind="number" if isinstance(made, (bool, int, float)) else "other")

    def _storage(self, t: torch.Tensor) -> int:
        self._alive.append(t)
        return self._numbers.setdefault(t.untyped_storage()._cdata, len(self._numbers))


def states_of_module(module: nn.Module, path: str) -> dict[str, torch.Tensor]:
    """Parameters and buffers of an opaque module, by full name."""
    prefix = f"{path}." if path else ""
    return {f"{prefix}{name}": t for name, t in (*module.named_parameters(), *module.named_buffers())}


def references(step: TracedStep) -> tuple[str, ...]:
    """Names of values that a step reads."""
    return tuple(r.name for r in reads(step) if isinstance(r, Ref))
