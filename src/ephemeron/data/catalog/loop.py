"""One event loop per process, in a thread of its own, behind a blocking interface.

A thread that reads submits a coroutine and waits. All reading therefore shares one loop: requests of many threads overlap, and
state that is confined to the loop needs no lock. A forked child has no such thread and starts its own, so loops are kept by process
id.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_UNPACKERS = 2


class _Loop:
    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever, name="ephemeron-datasets", daemon=True)
        self.unpackers = ThreadPoolExecutor(_UNPACKERS, thread_name_prefix="ephemeron-unpack")


_loops: dict[int, _Loop] = {}


def _own() -> _Loop:
    own = _loops.get(os.getpid())
    if own is None:
        made = _Loop()
        own = _loops.setdefault(os.getpid(), made)  # atomic: of several threads, one wins
        if own is made:
            made.thread.start()
        else:
            made.loop.close()
    return own


def end() -> None:
    """Ends the loop of this process and its threads. Only for a process whose code has no other reader."""
    own = _loops.pop(os.getpid(), None)
    if own is None:
        return
    own.loop.call_soon_threadsafe(own.loop.stop)
    own.thread.join()
    own.loop.close()
    own.unpackers.shutdown(wait=True, cancel_futures=True)


def submit(work: Coroutine[Any, Any, T]) -> Future[T]:
    """Starts `work` on the loop of this process."""
    return asyncio.run_coroutine_threadsafe(work, _own().loop)


def run(work: Coroutine[Any, Any, T]) -> T:
    """Result of `work`, which runs on the loop of this process while this thread waits."""
    own = _own()
    if threading.current_thread() is own.thread:
        work.close()
        raise RuntimeError("the loop of the datasets cannot wait for itself")
    future = asyncio.run_coroutine_threadsafe(work, own.loop)
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


def unpackers() -> ThreadPoolExecutor:
    """Threads for unpacking. Separate from the reading threads, since unpacking may wait for reading."""
    return _own().unpackers
