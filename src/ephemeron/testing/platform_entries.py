"""Small functions that the platform contract runs. Apart from the kit, so that functions need not import pytest.

A platform under test has them as entries of its deployment: `EPHEMERON_ENTRIES` is `declaration()`.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ephemeron.errors import InvocationRefused
from ephemeron.events import Note
from ephemeron.functions.context import Context

NEVER_S = 1_000_000.0
"""Longer than any lifetime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRequest:
    """Arguments of the functions of this module."""

    say: object = None
    events: int = 0
    mb: int = 0
    attempts: int = 1
    next: str = ""
    """Entry that the function calls."""
    next_memory_mb: int = 0
    """Memory of that call; 0: the function's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedResult:
    """Result of `timed`, in seconds."""

    took_s: float
    left_s: float
    """Until the deadline, at its beginning."""
    run_s: float
    """Since the run's t = 0, at its beginning."""


NAMES = ("echo", "fail", "timed", "forever", "talk", "vanish", "killed", "allocate", "share", "through_channel", "succeed", "call_next")


def declaration(module: str = __name__, names: Sequence[str] = NAMES) -> str:
    """Value of `EPHEMERON_ENTRIES` for the functions of a module, each an entry by its own name."""
    return ",".join(f"{name}={module}:{name}" for name in names)


async def echo(context: Context, request: EntryRequest) -> Mapping[str, object]:
    """Returns its argument."""
    return {"outcome": "finished", "rank": context.call.rank, "said": request.say, "cold": context.cold}


async def fail(context: Context, request: EntryRequest) -> Mapping[str, object]:
    """Raises."""
    raise ValueError("seven is\nnot a colour")


async def timed(context: Context, request: EntryRequest) -> TimedResult:
    """Takes some time, and measures it."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    await asyncio.sleep(0.05)
    took_s = loop.time() - begin
    return TimedResult(took_s=took_s, left_s=context.deadline - begin, run_s=begin - context.origin)


async def forever(context: Context, request: EntryRequest) -> Mapping[str, object]:
    """Emits an event, and does not end by itself."""
    context.emit(Note(t=0.0, text="alive"))
    await asyncio.sleep(NEVER_S)
    return {}


async def talk(context: Context, request: EntryRequest) -> Mapping[str, object]:
    """Emits many events, in order."""
    for n in range(request.events):
        context.emit(Note(t=float(n), text=f"event {n}"))
    return {}


async def vanish(context: Context, request: EntryRequest) -> Mapping[str, object]:
    """Dies by an injected fault, after a last event."""
    context.emit(Note(t=0.0, text="last word"))
    context.die()


async def killed(context: Context, request: EntryRequest) -> Mapping[str, object]:
    """Dies by SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


async def allocate(context: Context, request: EntryRequest) -> Mapping[str, object]:
    """Takes memory, megabyte by megabyte, all of it touched."""
    held = []
    for _ in range(request.mb):
        held.append(bytearray(os.urandom(1024) * 1024))
        await asyncio.sleep(0)
    return {"held_mb": len(held)}


async def share(context: Context, request: EntryRequest) -> Mapping[str, object]:
    """Leaves traces in its scratch folder and in a module of its own, and reports those it found."""
    scratch = context.scratch
    if scratch is None:
        return {"scratch": None}
    found = sorted(path.name for path in scratch.iterdir())
    (scratch / "users_module_of_the_contract.py").write_text("count = 0\n")
    sys.path.insert(0, str(scratch))
    importlib.invalidate_caches()
    module: Any = importlib.import_module("users_module_of_the_contract")
    module.count += 1
    return {"scratch": str(scratch), "found": found, "count": module.count, "here": str(Path.cwd())}


async def through_channel(context: Context, request: EntryRequest) -> Mapping[str, object]:
    """Counts in the channel, which is what invocations do share."""
    key = f"{context.call.run}/count"
    before = await context.channel.fetch(key)
    count = int(bytes(before)) + 1 if before is not None else 1
    await context.channel.put(key, [str(count).encode()])
    return {"count": count}


async def succeed(context: Context, request: EntryRequest) -> Mapping[str, object]:
    """Starts the next attempt of itself until as many as are wanted have run."""
    call = context.call
    if call.attempt + 1 < request.attempts:
        await context.invoke(replace(call, attempt=call.attempt + 1, reason="relay"))
        return {"outcome": "relayed"}
    return {"outcome": "finished"}


async def call_next(context: Context, request: EntryRequest) -> Mapping[str, object]:
    """Calls another entry, and returns why it was refused; empty: it was not."""
    call, memory_mb = context.call, request.next_memory_mb or context.call.memory_mb
    try:
        await context.invoke(replace(call, attempt=1, entry=request.next, memory_mb=memory_mb, request={}))
    except InvocationRefused as e:
        return {"refused": str(e)}
    return {"refused": ""}
