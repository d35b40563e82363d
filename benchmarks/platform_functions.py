"""What the functions of `benchmarks.platforms` run. Imports nothing but what a function has anyway."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any


async def dispatch(context: Any) -> dict[str, Any]:
    """Says when its code began, to the channel too; starts the next attempt of itself where more are wanted."""
    began, call = time.time(), context.call
    if call.attempt + 1 < int(call.request.get("attempts", 1)):
        await context.invoke(replace(call, attempt=call.attempt + 1, reason="relay"))
    said = {"began": began, "cold": context.cold}
    await context.channel.put(f"{call.run}/began/{call.rank}/{call.attempt}", [json.dumps(said).encode()])
    return said
