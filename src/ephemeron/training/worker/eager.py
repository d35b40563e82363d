"""Optimisers of `torch.optim` without PyTorch's compiler, which they import and do not use.

Making an `Optimizer` and stepping it import `torch._dynamo`, to tell it to keep away: 1.1 of the 2.3 CPU seconds of a cold
start, paid for by every function. Where nothing is compiled there is nothing to keep away. While an optimiser works, a
stand-in of that name says so; whoever asks it for anything else gets the real module. Where the real one has been imported
already, as by a model that is compiled, nothing is done.
"""

from __future__ import annotations

import importlib
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch

_NAME = "torch._dynamo"
_lock = threading.RLock()


@contextmanager
def eager_optimizers() -> Iterator[None]:
    """Whatever an optimiser does in here imports no compiler. May be nested."""
    with _lock:
        if _NAME in sys.modules:
            yield
            return
        stand_in = _StandIn(_NAME)
        sys.modules[_NAME] = stand_in
        torch.__dict__["_dynamo"] = stand_in
        try:
            yield
        finally:
            stand_in.leave()


class _StandIn(ModuleType):
    """What optimisers call of `torch._dynamo`, without effect."""

    def disable(self, fn: Any, *_: Any, **__: Any) -> Any:
        """There is no compiler to hide it from."""
        return fn

    def graph_break(self, *_: Any, **__: Any) -> None:
        """There is no graph."""

    def leave(self) -> None:
        """Makes room for the real one."""
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        if torch.__dict__.get("_dynamo") is self:
            del torch.__dict__["_dynamo"]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by the import system
            raise AttributeError(name)
        self.leave()
        return getattr(importlib.import_module(_NAME), name)
