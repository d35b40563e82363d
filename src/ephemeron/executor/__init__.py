"""Python functions on serverless functions, with the interface of `concurrent.futures`: see `FunctionExecutor`.

    shipping             from a function to objects that other processes can load
    trees                tasks that combine results
    batching             how many tasks go together. Pure
    places, fleet        opening a platform, keeping functions running
    remains              what killed clients have left
    session, drivers     the client's loop, and the thread that it lives in
    executor, futures    the public interface
    predict              a trained model on many inputs

Names are imported when they are first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ephemeron.executor.executor import FunctionExecutor
    from ephemeron.executor.futures import TaskFuture
    from ephemeron.executor.session import Bill

_HOME = {"Bill": "session", "FunctionExecutor": "executor", "TaskFuture": "futures"}

__all__ = ["Bill", "FunctionExecutor", "TaskFuture"]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
