"""The port `Resolver`: how an executor finds the code of a task. Which one it uses is said by its call, never by the store.

A resolver's function gets the task and its inputs and returns bytes or a JSON value. It runs on the compute thread, so it may block.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TypeAlias

from ephemeron.communication.channels.base import Channel
from ephemeron.config.typed import near
from ephemeron.errors import JobError
from ephemeron.functions.tasks.model import TaskEdge, TaskSpec
from ephemeron.functions.tasks.running_task import Reporting

TaskFunction: TypeAlias = Callable[[TaskSpec, Sequence[memoryview]], object]


class TaskOrder:
    """What follows from a task: its edges, and which stored inputs and outputs it needs. None by default."""

    def edges(self, task: TaskSpec) -> Sequence[TaskEdge]:
        """Edges that are connected before the result of a task is recorded: of graphs that are computed where they run."""
        return ()

    def readers(self, task: TaskSpec) -> Mapping[str, int]:
        """Inputs of a task that are deleted when so many tasks that name them here have ended."""
        return {}

    def is_stored(self, task: TaskSpec) -> bool:
        """Whether an earlier run has stored the outputs of a task, so that its inputs are not read and it is not run."""
        return False

    async def look_again(self, task: TaskSpec) -> bool:
        """Whether the outputs of a task, of which an input is gone, are stored by now: another run computes the same graph."""
        return False

    async def unread(self, task: TaskSpec) -> Sequence[str]:
        """Keys of stored outputs of a task that no task will read any more."""
        return ()


class Resolver(TaskOrder, ABC):
    """Finds functions. An executor asks for each function once."""

    @abstractmethod
    async def resolve(self, function: str) -> TaskFunction:
        """The code of `TaskSpec.function`. Whatever it raises is the failure of each task of this function."""

    def encode_error(self, error: Exception) -> bytes:
        """An exception of a task, for `TaskResult.data`; empty: its text and traceback alone are recorded. On the compute thread."""
        return b""

    async def is_cancelled(self, task: TaskSpec) -> bool:
        """Whether the client has cancelled a running task, which is interrupted then. Asked as often as leases are renewed."""
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class ResolverContext:
    """What a resolver may use."""

    channel: Channel
    """Verifies signatures, if the call has a key."""
    run: str
    key: str
    """Of the run; empty: nothing from the store may be executed."""
    functions: tuple[str, ...]
    """`ExecutorRequest.functions`."""
    scratch: Path | None = None
    """Folder of the invocation; None where there is no file system to use."""
    reporting: Reporting = field(default_factory=Reporting)
    """How tasks report values before their end."""


_TABLE = {"modules": "ephemeron.functions.tasks.resolver:ModuleResolver", "shipped": "ephemeron.functions.shipped_tasks:ShippedResolver"}


def open_resolver(name: str, context: ResolverContext) -> Resolver:
    """The resolver of that name.

    Raises:
        JobError: there is none.
    """
    if name not in _TABLE:
        raise JobError(f"no resolver {name!r}", remedy=near(name, _TABLE, what="resolvers"))
    module, _, kind = _TABLE[name].partition(":")
    made: Resolver = getattr(import_module(module), kind)(context)
    return made


class ModuleResolver(Resolver):
    """Functions `module:function` that are installed where the executor runs, of allowed modules only.

    They are called as `function(*inputs, **arguments)`; a payload is the first of the inputs.
    """

    def __init__(self, context: ResolverContext) -> None:
        self._allowed = context.functions

    async def resolve(self, function: str) -> TaskFunction:
        module, colon, name = function.partition(":")
        if not colon or (module not in self._allowed and function not in self._allowed):
            raise JobError(
                f"tasks may not run {function!r}",
                remedy="name its module, or it, in the executors' functions; allowed: " + (", ".join(self._allowed) or "none"),
            )
        code = getattr(import_module(module), name)

        def run(task: TaskSpec, inputs: Sequence[memoryview]) -> object:
            payload = (memoryview(task.payload),) if task.payload else ()
            return code(*payload, *inputs, **task.arguments)

        return run
