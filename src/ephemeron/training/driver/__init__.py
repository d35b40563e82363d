"""The client's part of a run: preparation, launch, supervision, metering and result.

Names are imported when they are first used: a command needs few of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ephemeron.training.driver.api import configure, dry_run, launch, resize, train
    from ephemeron.training.driver.result import Result
    from ephemeron.training.driver.session import Session, train_async

_LAZY = {
    "Result": "result",
    "Session": "session",
    "configure": "api",
    "dry_run": "api",
    "launch": "api",
    "resize": "api",
    "train": "api",
    "train_async": "session",
}

__all__ = ["Result", "Session", "configure", "dry_run", "launch", "resize", "train", "train_async"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
