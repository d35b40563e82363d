"""Control functions that kill their process at a given point of their first attempt. Without PyTorch, so that they start quickly."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from typing import Any

from ephemeron.functions.context import Context
from ephemeron.regions.control.function import ControlRequest, ControlResult, ControlStore, run_geo_addressing, run_geo_scheduling

ENTRIES = "geo-addressing=control_entries:dies_before_it_answers,geo-scheduling=control_entries:dies_before_it_stores"


def _kill_at(kind: str, ctx: Context) -> None:
    """Has this process killed when it would create an object of a kind, in the first attempt."""
    if ctx.call.attempt > 1:
        return
    create = ControlStore.create

    async def killing(self: ControlStore, now: str, name: object, value: Mapping[str, Any]) -> bool:
        if now == kind:
            os.kill(os.getpid(), signal.SIGKILL)
        return await create(self, now, name, value)

    ControlStore.create = killing  # type: ignore[method-assign]


async def dies_before_it_answers(ctx: Context, request: ControlRequest) -> ControlResult:
    _kill_at("answer", ctx)
    return await run_geo_addressing(ctx, request)


async def dies_before_it_stores(ctx: Context, request: ControlRequest) -> ControlResult:
    _kill_at("state", ctx)
    return await run_geo_scheduling(ctx, request)
