"""Test kits for implementations of the ports `Channel`, `Platform` and `TaskQueue`, and for training on them. Need pytest."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ephemeron.testing.channel_contract import ChannelConnectionContract, ChannelContract
    from ephemeron.testing.platform_contract import PlatformConnectionContract, PlatformContract
    from ephemeron.testing.task_queue_contract import TaskQueueConnectionContract, TaskQueueContract
    from ephemeron.testing.training_matrix import TrainingMatrix
    from ephemeron.testing.training_world import TrainingWorld

_LAZY = {
    "ChannelConnectionContract": "channel_contract",
    "ChannelContract": "channel_contract",
    "PlatformConnectionContract": "platform_contract",
    "PlatformContract": "platform_contract",
    "TaskQueueConnectionContract": "task_queue_contract",
    "TaskQueueContract": "task_queue_contract",
    "TrainingMatrix": "training_matrix",
    "TrainingWorld": "training_world",
}

__all__ = [
    "ChannelConnectionContract",
    "ChannelContract",
    "PlatformConnectionContract",
    "PlatformContract",
    "TaskQueueConnectionContract",
    "TaskQueueContract",
    "TrainingMatrix",
    "TrainingWorld",
]


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_LAZY[name]}"), name)
