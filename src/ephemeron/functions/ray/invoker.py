"""Sender of calls as actors. The same for a client and for a function that invokes its successor."""

from __future__ import annotations

import asyncio
import os
import secrets
from dataclasses import dataclass, field
from typing import Any

from ephemeron.errors import InvocationRefused
from ephemeron.functions.async_invoke.invoker import RecordedSender
from ephemeron.functions.base import Call
from ephemeron.functions.ray.cluster import cpus_of, ray_module
from ephemeron.units import MIB

INLINE_BYTES = 64_000
"""Larger calls go through the channel. Ray would put arguments of 100 KB and more into its object store."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSettings:
    """Settings of calls on a cluster. Pickled by Ray, and without secrets."""

    namespace: str
    """Namespace of the run's actors."""
    mb_per_vcpu: float
    gpus: float = 0.0
    variables: dict[str, str] = field(default_factory=dict)


def namespace_of(run: str) -> str:
    """Namespace of the actors of a run."""
    return f"ephemeron.{run}"


class RaySender(RecordedSender):
    """Makes one actor for each call.

    Args:
        told: of the cluster.
        actor: `ray.actor.Actor`, the class of the actors.
        sender: further arguments of `RecordedSender`.
    """

    def __init__(self, told: WorkerSettings, actor: type[object], **sender: Any) -> None:
        super().__init__(inline_bytes=INLINE_BYTES, variables={**os.environ, **told.variables}, **sender)
        self._told, self._actor = told, actor

    async def request(self, event: bytes, call: Call) -> str:
        name = secrets.token_hex(8)
        try:
            await asyncio.to_thread(self._make, name, event, call.memory_mb)
        except Exception as e:
            raise InvocationRefused(f"Ray does not take the call: {type(e).__name__}: {e}") from e
        return name

    def _make(self, name: str, event: bytes, memory_mb: int) -> None:
        ray_module().remote(self._actor).options(
            name=name,
            namespace=self._told.namespace,
            # Owned by the cluster: not ended together with the client, or with the function that invokes its successor.
            lifetime="detached",
            num_cpus=cpus_of(memory_mb, self._told.mb_per_vcpu),
            memory=memory_mb * MIB,
            num_gpus=self._told.gpus,
            # Never started again by Ray. A second start would be the same attempt, and fenced off; and by then
            # the run has sent a replacement, from the state of the peers and not from the beginning.
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=16,
            # One node's death is to take few of them.
            scheduling_strategy="SPREAD",
        ).remote(event, name, memory_mb, self._told)
