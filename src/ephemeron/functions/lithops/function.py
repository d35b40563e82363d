"""The function that Lithops runs: a supervisor of one delivery of one call. Unpickled by name, from the runtime's package."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ephemeron import logs
from ephemeron.config.typed import build
from ephemeron.functions.async_invoke.process_supervisor import OneShotSupervisor
from ephemeron.functions.async_invoke.records import InvokeRequest
from ephemeron.functions.lithops.invoker import Executor, LithopsSender, LithopsTask
from ephemeron.functions.lithops.settings import LithopsSettings


def run_call(message: Mapping[str, object]) -> str:
    """Runs a call until it has ended, and its outcome is in the channel.

    Args:
        message: a `LithopsTask` as JSON, so that Lithops pickles no class of this package.

    Returns:
        Its status.
    """
    logs.configure()
    task = build(LithopsTask, message, where="task of Lithops")
    envelope = InvokeRequest.from_event(json.loads(task.event))
    with tempfile.TemporaryDirectory(prefix="ephemeron-") as folder:
        return asyncio.run(_serve(task, envelope, Path(folder)))


async def _serve(task: LithopsTask, envelope: InvokeRequest, folder: Path) -> str:
    supervisor = BackendSupervisor(task.settings, task.memory_mb, folder)
    try:
        return (await supervisor.serve(envelope, request=task.request)).status
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
        super().__init__(folder, memory_mb=memory_mb, vcpus=memory_mb / settings.mb_per_vcpu, variables=settings.variables)
        self._executor = Executor(settings, run_call)

    def sender(self, callback: str, **sender: Any) -> LithopsSender:
        return LithopsSender(self._executor, started=lambda request, future: None, **sender)
