"""Small functions that the platform contract runs. Apart from the kit, so that functions need not import pytest.

A platform under test runs `dispatch`, which looks up what to do in the call's request.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ephemeron.config.typed import build
from ephemeron.events import Note
from ephemeron.functions.context import Context
from ephemeron.functions.function_main import Entry

NEVER_S = 1_000_000.0
"""Longer than any lifetime."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryRequest:
    """Arguments of the functions of this module."""

    entry: str
    """Name of the function."""
    say: object = None
    events: int = 0
    mb: int = 0
    attempts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class TimedResult:
    """Result of `timed`, in seconds."""

    took_s: float
    left_s: float
    """Until the deadline, at its beginning."""
    run_s: float
    """Since the run's t = 0, at its beginning."""


def _request(context: Context) -> EntryRequest:
    return build(EntryRequest, context.call.request, where="request of a contract's function")


async def dispatch(context: Context) -> Mapping[str, object]:
    """Runs the function of this module that `request["entry"]` names."""
    entry: Entry = globals()[str(context.call.request["entry"])]
    return await entry(context)


async def echo(context: Context) -> Mapping[str, object]:
    """Returns its argument."""
    said = _request(context).say
    return {"outcome": "finished", "rank": context.call.rank, "said": said, "cold": context.cold}


async def fail(context: Context) -> Mapping[str, object]:
    """Raises."""
    raise ValueError("seven is\nnot a colour")


async def timed(context: Context) -> Mapping[str, object]:
    """Takes some time, and returns its `TimedResult`."""
    loop = asyncio.get_running_loop()
    begin = loop.time()
    await asyncio.sleep(0.05)
    took_s = loop.time() - begin
    return asdict(TimedResult(took_s=took_s, left_s=context.deadline - begin, run_s=begin - context.origin))


async def forever(context: Context) -> Mapping[str, object]:
    """Emits an event, and does not end by itself."""
    context.emit(Note(t=0.0, text="alive"))
    await asyncio.sleep(NEVER_S)
    return {}


async def talk(context: Context) -> Mapping[str, object]:
    """Emits many events, in order."""
    for n in range(_request(context).events):
        context.emit(Note(t=float(n), text=f"event {n}"))
    return {}


async def vanish(context: Context) -> Mapping[str, object]:
    """Dies by an injected fault, after a last event."""
    context.emit(Note(t=0.0, text="last word"))
    context.die()


async def killed(context: Context) -> Mapping[str, object]:
    """Dies by SIGKILL."""
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


async def allocate(context: Context) -> Mapping[str, object]:
    """Takes memory, megabyte by megabyte, all of it touched."""
    held = []
    for _ in range(_request(context).mb):
        held.append(bytearray(os.urandom(1024) * 1024))
        await asyncio.sleep(0)
    return {"held_mb": len(held)}


async def share(context: Context) -> Mapping[str, object]:
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


async def through_channel(context: Context) -> Mapping[str, object]:
    """Counts in the channel, which is what invocations do share."""
    key = f"{context.call.run}/count"
    before = await context.channel.fetch(key)
    count = int(bytes(before)) + 1 if before is not None else 1
    await context.channel.put(key, [str(count).encode()])
    return {"count": count}


async def succeed(context: Context) -> Mapping[str, object]:
    """Starts the next attempt of itself until `request["attempts"]` have run."""
    call = context.call
    if call.attempt + 1 < _request(context).attempts:
        await context.invoke(replace(call, attempt=call.attempt + 1, reason="relay"))
        return {"outcome": "relayed"}
    return {"outcome": "finished"}
