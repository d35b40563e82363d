"""Functions that the tests of the local platform run. Without PyTorch, so that they start quickly."""

from __future__ import annotations

import _thread
import asyncio
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from typing import Any

from ephemeron.events import Note
from ephemeron.functions.context import Context
from ephemeron.units import MIB


async def dispatch(context: Context, request: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = await globals()[request["function"]](context)
    return out


async def whoami(context: Context) -> dict[str, Any]:
    names = context.call.request.get("variables", ())
    return {
        "pid": os.getpid(),
        "cold": context.cold,
        "scratch": str(context.scratch),
        "here": os.getcwd(),
        "left": os.listdir("."),
        "threads": context.compute.threads,  # type: ignore[attr-defined]
        "env": {name: os.environ.get(name) for name in names},
    }


async def litter(context: Context) -> dict[str, Any]:
    """Leaves in its process what it should not."""
    os.environ["LITTER"] = "1"
    sys.path.append("/litter")
    random.seed(0)
    return await whoami(context)


async def find_litter(context: Context) -> dict[str, Any]:
    drawn = random.random()
    random.seed(0)
    return {"found": ["LITTER" in os.environ, "/litter" in sys.path, drawn == random.random()], **await whoami(context)}


async def leave_thread(context: Context) -> dict[str, Any]:
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    return await whoami(context)


async def call_from_a_foreign_thread(context: Context) -> dict[str, Any]:
    """What the pool of a library does that calls Python, and that `threading` has not started."""
    seen, ends = threading.Event(), threading.Event()

    def call() -> None:
        threading.current_thread()
        seen.set()
        ends.wait()

    _thread.start_new_thread(call, ())
    await asyncio.to_thread(seen.wait)
    return await whoami(context)


async def leave_child(context: Context) -> dict[str, Any]:
    child = await asyncio.create_subprocess_exec("sleep", "1000")
    # A third process that left the group and the session of the function, and whose parent is gone.
    shell = await asyncio.create_subprocess_shell("setsid sleep 1000 >&2 & echo $!", stdout=subprocess.PIPE)
    line, _ = await shell.communicate()
    return {"child": child.pid, "stray": int(line), **await whoami(context)}


async def allocate(context: Context) -> dict[str, Any]:
    kept = []
    for _ in range(int(context.call.request["mb"])):
        kept.append(bytearray(os.urandom(1024) * 1024))
        await asyncio.sleep(0)
    await asyncio.sleep(float(context.call.request.get("then_s", 0)))
    return {"kept": len(kept) * MIB}


async def killed(context: Context) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    return {}


async def leave(context: Context) -> dict[str, Any]:
    os._exit(7)


async def group_fails(context: Context) -> dict[str, Any]:
    async with asyncio.TaskGroup() as group:
        group.create_task(_fails())
    return {}


async def _fails() -> None:
    raise RuntimeError("inside a task group")


async def no_json(context: Context) -> dict[str, Any]:
    return {"a set": {1, 2}}


async def hold(context: Context) -> dict[str, Any]:
    """Runs until the key `go` is in the channel."""
    context.emit(Note(t=0.0, text="alive"))
    await context.channel.get("go", deadline=context.deadline)
    context.emit(Note(t=1.0, text="went on"))
    return {"outcome": "finished", "pid": os.getpid()}
