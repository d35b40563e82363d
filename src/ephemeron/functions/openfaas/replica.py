"""A replica: the handler's container, in which the function's process runs beside the handler, under the container's limits.

Calls are served by a `ProcessSupervisor`. A process that has ended well and left nothing behind serves the next call;
otherwise another one is started in advance.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ephemeron.functions.async_invoke.process_supervisor import ProcessSupervisor, pass_output_on
from ephemeron.functions.async_invoke.records import HandlerOutcome
from ephemeron.functions.async_invoke.sizes import FUNCTION, sizes_in
from ephemeron.functions.cgroups import Enforcement
from ephemeron.functions.function_process import FunctionProcess
from ephemeron.functions.openfaas.gateway import Gateway
from ephemeron.functions.openfaas.invoker import GatewaySender
from ephemeron.functions.openfaas.settings import OpenFaasSettings

_WATCH_S = 0.2
_NOTHING = Enforcement(kind="none")
_GROUP_FILES = (
    ("/sys/fs/cgroup/memory{path}/memory.oom_control", "memory"),
    ("/sys/fs/cgroup{path}/memory.events", ""),
    ("/sys/fs/cgroup/memory/memory.oom_control", "memory"),
    ("/sys/fs/cgroup/memory.events", ""),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """Description of the function, from the environment variables that `cloud deploy` sets."""

    memory_mb: int
    """Limit of the replica, handler included."""
    vcpus: float
    lifetime_s: float
    gateway: OpenFaasSettings
    """Address of the gateway for functions, and the deployment's name and sizes."""
    digest: str = ""


class Resident(FunctionProcess):
    """A process that shares a container, and so its limits, with the handler."""

    def __init__(self, n: int, *, memory_mb: int, vcpus: float, folder: Path) -> None:
        super().__init__(_NOTHING, n, memory_mb=memory_mb, vcpus=vcpus, env=os.environ, folder=folder)
        self._kills_before = out_of_memory_kills()

    def oom_killed(self) -> bool:
        return super().oom_killed() or out_of_memory_kills() > self._kills_before

    async def _watch(self) -> None:
        while True:
            self.peak_mb = max(self.peak_mb, self._resident_mb())
            await asyncio.sleep(_WATCH_S)


class FunctionReplica(ProcessSupervisor):
    """Serves calls, one after the other.

    Args:
        told: of the function.
        folder: for scratch folders and output; the replica's own.
    """

    def __init__(self, told: ReplicaSettings, folder: Path) -> None:
        super().__init__(folder, vcpus=told.vcpus, lifetime_s=told.lifetime_s)
        self._told = told

    def make(self, n: int) -> Resident:
        pass_output_on(self._folder, n)
        return Resident(n, memory_mb=self._told.memory_mb, vcpus=self._told.vcpus, folder=self._folder)

    def sender(self, callback: str, **sender: Any) -> GatewaySender:
        return GatewaySender(Gateway(self._told.gateway), callback=callback, **sender)


def out_of_memory_kills(own: Path = Path("/proc/self/cgroup")) -> int:
    """Processes that the kernel has killed in this control group because memory ran out; 0 if unknown."""
    try:
        lines = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return 0
    paths = {controller: path.rstrip("/") for _, names, path in lines for controller in names.split(",")}
    for pattern, controller in _GROUP_FILES:
        if controller in paths:
            try:
                text = Path(pattern.format(path=paths[controller])).read_text()
            except OSError:
                continue
            counts = dict(line.split(None, 1) for line in text.splitlines())
            return int(counts.get("oom_kill", 0))
    return 0


def told_by(environ: Mapping[str, str]) -> ReplicaSettings:
    """Reads the environment variables that `cloud deploy` sets.

    Raises:
        KeyError, ValueError: the function was deployed otherwise.
    """
    return ReplicaSettings(
        memory_mb=int(environ["EPHEMERON_MEMORY_MB"]),
        vcpus=float(environ["EPHEMERON_VCPUS"]),
        lifetime_s=float(environ["EPHEMERON_LIFETIME_S"]),
        digest=environ.get("EPHEMERON_CODE", ""),
        gateway=OpenFaasSettings(
            gateway=environ["EPHEMERON_GATEWAY"],
            function=environ[FUNCTION],
            namespace=environ.get("EPHEMERON_NAMESPACE", ""),
            sizes_mb=sizes_in(environ),
        ).located(),
    )


def gateway_answer(outcome: HandlerOutcome, delivery: str) -> bytes:
    """Answer to the gateway, and to a call-back: small, since the value is in the store."""
    error = outcome.error.splitlines()[0] if outcome.error else ""
    return json.dumps({"id": delivery, "status": outcome.status, "error": error}).encode()
