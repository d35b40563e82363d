"""Test kits for implementations of the ports `Channel`, `Platform` and `TaskQueue`, and for training on them. Need pytest."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ephemeron.testing.channel_contract import ChannelContract
    from ephemeron.testing.platform_contract import PlatformContract
    from ephemeron.testing.task_queue_contract import TaskQueueContract
    from ephemeron.testing.training_matrix import TrainingMatrix
    from ephemeron.testing.training_world import TrainingWorld

_LAZY = {
    "ChannelContract": "channel_contract",
    "PlatformContract": "platform_contract",
    "TaskQueueContract": "task_queue_contract",
    "TrainingMatrix": "training_matrix",
    "TrainingWorld": "training_world",
}

__all__ = ["ChannelContract", "PlatformContract", "TaskQueueContract", "TrainingMatrix", "TrainingWorld"]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
