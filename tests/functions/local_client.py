"""A client that starts a function and is then killed by its test: `local_client.py FOLDER ENV`."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path

from ephemeron.events import Note
from ephemeron.functions.base import Call, Limits
from ephemeron.functions.local import LocalPlatform


async def main() -> None:
    platform = await LocalPlatform.start(Path(sys.argv[1]), env=json.loads(sys.argv[2]), limits=Limits(memory_max_mb=4096), linger_s=0.3)
    call = Call(
        run="a run",
        rank=0,
        attempt=0,
        memory_mb=256,
        lifetime_s=60,
        channel="folder",
        origin=time.time(),
        entry="test",
        request={"function": "hold"},
    )
    await platform.invoke(call)
    async for event in platform.events("a run"):
        if isinstance(event, Note):
            break
    print("invoked", flush=True)
    await asyncio.sleep(600)


asyncio.run(main())
