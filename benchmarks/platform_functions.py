"""Entry of the functions of `benchmarks.platforms`. It imports only modules that a function has loaded anyway."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from typing import Any


async def dispatch(context: Any) -> dict[str, Any]:
    """Reports when its code began, also to the channel, and starts its next attempt if more are wanted."""
    began, call = time.time(), context.call
    if call.attempt + 1 < int(call.request.get("attempts", 1)):
        await context.invoke(replace(call, attempt=call.attempt + 1, reason="relay"))
    said = {"began": began, "cold": context.cold}
    await context.channel.put(f"{call.run}/began/{call.rank}/{call.attempt}", [json.dumps(said).encode()])
    return said
