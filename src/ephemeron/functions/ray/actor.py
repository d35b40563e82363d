"""Actor that supervises one delivery of one call on a node, and then ends itself.

Its class is imported by the nodes by name, so they need this package in the client's release (`preflight` asks them).
The call is an argument of the constructor: Ray's head starts the actor even if its sender is gone by then.
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

from ephemeron.communication.direct.transport import HOST_VARIABLE
from ephemeron.functions.async_invoke.process_supervisor import OneShotSupervisor
from ephemeron.functions.async_invoke.records import InvokeRequest
from ephemeron.functions.ray.invoker import RaySender, WorkerSettings

_LEAVE_S = 10.0


class NodeSupervisor(OneShotSupervisor):
    """Runs one call in a process beside the actor's.

    Args:
        told: settings of calls on this cluster.
        memory_mb: quota of this call.
        folder: its own.
    """

    def __init__(self, told: WorkerSettings, memory_mb: int, folder: Path) -> None:
        import ray

        # Where this node listens for others, its functions do: that is loopback on a cluster of this machine alone.
        variables = {HOST_VARIABLE: ray.util.get_node_ip_address(), **told.variables}
        super().__init__(folder, memory_mb=memory_mb, vcpus=memory_mb / told.mb_per_vcpu, variables=variables)
        self._told = told

    def sender(self, callback: str, **sender: Any) -> RaySender:
        return RaySender(self._told, Actor, **sender)


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
        """Never returns: Ray ends the caller's wait when this actor has ended, with the reason."""
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
    """Releases the node's resources: the state of the call is in the channel."""
    import ray

    sys.stdout.flush()
    threading.Timer(_LEAVE_S, os._exit, (0,)).start()  # in case Ray no longer answers
    ray.kill(ray.get_runtime_context().current_actor)
