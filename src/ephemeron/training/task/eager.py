"""Optimisers of `torch.optim` without the import of PyTorch's compiler, which they do not use.

Constructing and stepping an `Optimizer` import `torch._dynamo`, to exclude these functions from compilation: 1.1 of the 2.3 CPU
seconds of a cold start, billed for every function. Where nothing is compiled, nothing has to be excluded. While an optimiser
works, a stand-in module of that name replaces the functions that optimisers call; any other attribute imports the real module.
Where the real one has been imported already, for example by a compiled model, nothing is replaced.
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
    """Context in which optimisers do not import the compiler. May be nested."""
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
    """Functions of `torch._dynamo` that optimisers call, without effect."""

    def disable(self, fn: Any, *_: Any, **__: Any) -> Any:
        """Returns the function: there is no compiler to exclude it from."""
        return fn

    def graph_break(self, *_: Any, **__: Any) -> None:
        """Does nothing: there is no graph."""

    def leave(self) -> None:
        """Removes the stand-in, so that the real module can be imported."""
        if sys.modules.get(_NAME) is self:
            del sys.modules[_NAME]
        if torch.__dict__.get("_dynamo") is self:
            del torch.__dict__["_dynamo"]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # asked by the import system
            raise AttributeError(name)
        self.leave()
        return getattr(importlib.import_module(_NAME), name)
