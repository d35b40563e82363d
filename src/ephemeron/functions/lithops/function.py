"""What Lithops runs: a supervisor of one delivery of one call. Lithops unpickles it by name, from the runtime's package."""

from __future__ import annotations

import asyncio
import json
import tempfile
from pathlib import Path
from typing import Any

from ephemeron.functions.async_invoke.process_supervisor import OneShotSupervisor
from ephemeron.functions.async_invoke.records import InvokeRequest
from ephemeron.functions.lithops.invoker import Executor, LithopsSender
from ephemeron.functions.lithops.settings import LithopsSettings


def run_call(message: dict[str, Any]) -> str:
    """Runs a call until it has ended, and its outcome is in the channel.

    Args:
        message: `event`, `request`, `memory_mb` and `told`, see `Executor.call`.

    Returns:
        How it ended, in a word.
    """
    settings = LithopsSettings(**message["told"])
    envelope = InvokeRequest.from_event(json.loads(message["event"]))
    with tempfile.TemporaryDirectory(prefix="ephemeron-") as folder:
        return asyncio.run(_serve(settings, envelope, message, Path(folder)))


async def _serve(settings: LithopsSettings, envelope: InvokeRequest, message: dict[str, Any], folder: Path) -> str:
    supervisor = BackendSupervisor(settings, message["memory_mb"], folder)
    try:
        return str((await supervisor.serve(envelope, request=message["request"]))["status"])
    finally:
        await supervisor.close()


class BackendSupervisor(OneShotSupervisor):
    """Runs one call in a process beside Lithops' own.

    Args:
        settings: of the platform.
        memory_mb: quota of this call.
        folder: its own.
    """

    def __init__(self, settings: LithopsSettings, memory_mb: int, folder: Path) -> None:
        super().__init__(
            folder, memory_mb=memory_mb, vcpus=memory_mb / settings.mb_per_vcpu, variables=settings.variables
        )
        self._executor = Executor(settings, run_call)

    def sender(self, callback: str, **voice: Any) -> LithopsSender:
        return LithopsSender(self._executor, started=lambda request, future: None, **voice)
