"""What runs on a node: an actor that supervises one delivery of one call, and then ends itself.

Its class is imported by the nodes by name, so they need this package in the client's release (`preflight` asks them).
The call is handed over with the constructor: Ray's head starts the actor from what it has been given, also when
whoever sent it is gone by then.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

from ephemeron.functions.async_invoke.process_supervisor import OneShotSupervisor
from ephemeron.functions.async_invoke.records import InvokeRequest
from ephemeron.functions.ray.invoker import RaySender, WorkerSettings

_LEAVE_S = 10.0


class NodeSupervisor(OneShotSupervisor):
    """Runs one call in a process beside the actor's.

    Args:
        told: what calls on this cluster need to know.
        memory_mb: quota of this call.
        folder: its own.
    """

    def __init__(self, told: WorkerSettings, memory_mb: int, folder: Path) -> None:
        super().__init__(folder, memory_mb=memory_mb, vcpus=memory_mb / told.mb_per_vcpu, variables=told.variables)
        self._told = told

    def sender(self, callback: str, **voice: Any) -> RaySender:
        return RaySender(self._told, Actor, **voice)


class Actor:
    """One invocation. Made by `RaySender`, on a node.

    Args:
        event: an `InvokeRequest`.
        request: the actor's own name.
        memory_mb: the call's quota.
        told: see `WorkerSettings`.
    """

    def __init__(self, event: bytes, request: str, memory_mb: int, told: WorkerSettings) -> None:
        self._envelope = InvokeRequest.from_event(json.loads(event))
        self._request, self._memory_mb, self._told = request, memory_mb, told
        threading.Thread(target=self._live, name="supervisor", daemon=True).start()

    async def ended(self) -> None:
        """Never answers: whoever has asked is told by Ray that this actor has ended, and how."""
        await asyncio.Event().wait()

    def _live(self) -> None:
        try:
            with tempfile.TemporaryDirectory(prefix="ephemeron-") as folder:
                asyncio.run(self._serve(Path(folder)))
        finally:
            _leave()

    async def _serve(self, folder: Path) -> None:
        supervisor = NodeSupervisor(self._told, self._memory_mb, folder)
        try:
            outcome = await supervisor.serve(self._envelope, request=self._request)
            sys.stdout.write(f"ephemeron: {self._envelope.id}: {outcome.status}\n")
        finally:
            await supervisor.close()


def _leave() -> None:
    """Gives the node's resources back: what is to be known of the call is in the channel."""
    import ray

    sys.stdout.flush()
    threading.Timer(_LEAVE_S, os._exit, (0,)).start()  # in case nobody listens any more
    ray.kill(ray.get_runtime_context().current_actor)
