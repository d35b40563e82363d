"""Callbacks of other frameworks on worker 0, which alone calls them: they watch a run, and cannot change what all workers share.

A callback that changes a parameter, a buffer or an option of an optimiser would part worker 0 from the others; it is refused by
name. What a callback holds is in checkpoints: its `state_dict`, or those of its attributes that are plain values or tensors.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from ephemeron.errors import JobError
from ephemeron.training.task.state_codec import pack


class MainCallbacks:
    """Callbacks of a program. The caller's objects are copied: a function has its own.

    Args:
        callbacks: in the order of their calls.
        remedy: what to do in place of changing the model.
    """

    def __init__(self, callbacks: Iterable[Any] = (), *, remedy: str = "") -> None:
        self.callbacks: Sequence[Any] = [copy.deepcopy(each) for each in callbacks]
        self.model: nn.Module | None = None
        """What callbacks must not change, as optimisers, too."""
        self.optimizers: Sequence[Any] = ()
        self._remedy = remedy

    def __bool__(self) -> bool:
        return bool(self.callbacks)

    def call(self, hook: str, *args: Any, **named: Any) -> list[Any]:
        """Calls a hook of each callback that has it; returns what they return.

        Raises:
            JobError: one changes the model or an optimiser.
        """
        found = []
        for each in self.callbacks:
            before = self._shared()
            found.append(getattr(each, hook)(*args, **named))
            if self._shared() != before:
                raise JobError(
                    f"{hook} of callback {type(each).__name__} changes the model or an optimiser, and is called on worker 0 alone",
                    remedy=self._remedy,
                )
        return found

    def _shared(self) -> list[object]:
        tensors = [] if self.model is None else [*self.model.parameters(), *self.model.buffers()]
        groups = [{k: v for k, v in g.items() if k != "params"} for o in self.optimizers for g in o.param_groups]
        return [*((id(t), t._version, t.requires_grad) for t in tensors), repr(groups)]

    def state(self) -> list[Mapping[str, Any]]:
        """What the callbacks hold, in their order."""
        return [each.state_dict() if _has_state(each) else _plain(vars(each)) for each in self.callbacks]

    def load(self, states: Sequence[Mapping[str, Any]]) -> None:
        """The inverse of `state`."""
        for each, state in zip(self.callbacks, states, strict=False):
            if _has_state(each):
                each.load_state_dict(state)
            else:
                vars(each).update(state)


def _has_state(callback: Any) -> bool:
    """Whether a class has a `state_dict` of its own."""
    own = [cls for cls in type(callback).__mro__ if "state_dict" in vars(cls)]
    return bool(own) and own[0].__module__.split(".")[0] not in ("lightning", "pytorch_lightning", "transformers")


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Those values that a checkpoint can hold."""
    found = {}
    for name, value in values.items():
        try:
            pack(value, name, {})
        except JobError:
            continue
        found[name] = value
    return found


def overrides(callback: Any, hook: str, base: type) -> bool:
    """Whether a callback has a hook of its own, as a method or as an attribute of the object."""
    own = getattr(callback, hook, None)
    return own is not None and getattr(own, "__func__", own) is not getattr(base, hook, None)
