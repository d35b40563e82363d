"""Entry of the functions of `benchmarks.platforms`. It imports only modules that a function has loaded anyway."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class StartRequest:
    """Attempts that follow one another."""

    attempts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StartResult:
    """Unix time at which the code began, and whether in a new environment."""

    began: float
    cold: bool


async def run_start(context: Any, request: StartRequest) -> StartResult:
    """Reports when its code began, also to the channel, and starts its next attempt if more are wanted."""
    began, call = time.time(), context.call
    if call.attempt + 1 < request.attempts:
        await context.invoke(replace(call, attempt=call.attempt + 1, reason="relay"))
    said = StartResult(began=began, cold=context.cold)
    await context.channel.put(f"{call.run}/began/{call.rank}/{call.attempt}", [json.dumps(asdict(said)).encode()])
    return said
