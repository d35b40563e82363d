"""Arguments of a function's code: everything that it may use of its platform."""

from __future__ import annotations

import asyncio
import contextvars
import sys
from collections.abc import Awaitable, Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

from ephemeron.communication.channels.base import Channel
from ephemeron.communication.direct.transport import Transport
from ephemeron.events import Event
from ephemeron.functions.base import Call
from ephemeron.user_code import guarded

T = TypeVar("T")


class Compute(Protocol):
    """Runs a computation over some samples, divided into batches that are computed one after another; the clock advances by its
    duration. What it raises is an `Exception`, see `user_code`."""

    async def __call__(self, work: Callable[[], T], *, samples: float, batches: int = 1) -> T: ...


class ThreadCompute:
    """Computation on one thread beside the event loop, so that transfers go on meanwhile.

    Args:
        threads: for PyTorch's operators; more than the CPU share would multiply their time.
    """

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="compute", initializer=self._prepare)
        self._latest: Future[Any] | None = None

    def _prepare(self) -> None:
        torch: Any = sys.modules.get("torch")  # code that computes with it has imported it
        if torch is not None:
            torch.set_num_threads(self.threads)

    async def __call__(self, work: Callable[[], T], *, samples: float, batches: int = 1) -> T:
        made = self._latest = self._executor.submit(contextvars.copy_context().run, _guarded, work)  # so that what it logs has its fields
        return await asyncio.wrap_future(made)

    def close(self) -> None:
        """Ends the thread, unless it still computes a result that has no waiter: a process with a thread left is not used again."""
        self._executor.shutdown(wait=self._latest is None or self._latest.done(), cancel_futures=True)


def _guarded(work: Callable[[], T]) -> T:
    with guarded():
        return work()


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """One invocation, from the view of its code."""

    call: Call
    invocation: str
    channel: Channel
    """Unmetered; the worker meters it."""
    emit: Callable[[Event], None]
    """Hands an event to the platform. Never blocks, never fails."""
    invoke: Callable[[Call], Awaitable[None]]
    """Starts another function of this run: a successor or a replacement."""
    compute: Compute
    origin: float
    """Loop time at the run's t = 0; may be negative."""
    deadline: float
    """Loop time at which the platform will kill this invocation."""
    die: Callable[[], NoReturn]
    """Injected death: does not return, and nothing of this invocation runs after it."""
    flush: Callable[[], None] = lambda: None
    """Waits, for seconds at most, until the platform has what was emitted: it is known then, whatever becomes of this invocation. Not to be
    called in the event loop."""
    cpu_time: Callable[[], float] = lambda: 0.0
    """CPU seconds of this process since some moment; 0 where time is virtual."""
    shared: Channel | None = None
    """Store that all groups of the run reach, in the simulator; elsewhere it is opened by its address."""
    transports: Callable[[], list[Transport]] | None = None
    """Ways in which this function connects to others of the run; None: see `direct_transports`."""
    scratch: Path | None = None
    """Empty folder of this invocation; None where there is no file system to use."""
    cold: bool = True
    overlaps: bool = True
    """Whether what a computation hands over for sending leaves in the course of it; False where time is virtual: at its beginning."""
    own_process: bool = True
    """Whether this invocation has its process to itself: it may start processes and threads, and ends them."""
