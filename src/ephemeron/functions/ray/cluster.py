"""A Ray cluster: connection, nodes, and the number of functions that fit at once.

`ray` is imported here, and only on first use. A process has one connection, ended by the module that has made it.
"""

from __future__ import annotations

import importlib
import logging
import math
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ephemeron.errors import JobError, MissingExtra
from ephemeron.units import MIB

_GRAIN = 10_000
"""Ray counts resources in ten-thousandths."""
_connecting = threading.Lock()
_users = 0
_ours = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """One living node."""

    id: str
    host: str
    cpus: float
    memory_mb: float
    """Memory that Ray can reserve: by default 70 % of the machine, without the object store."""
    gpus: float = 0.0


def ray_module() -> Any:
    """Ray itself.

    Raises:
        MissingExtra: it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ModuleNotFoundError:
        raise MissingExtra("ray", "ray") from None


def connect(address: str, namespace: str) -> None:
    """Joins the cluster as a client, unless this process has joined it already. Blocks for a second or two.

    Args:
        address: see `RaySettings`; not empty.
        namespace: default of this client; calls of a run name their own.

    Raises:
        JobError: no cluster answers, or its Ray or Python is another version.
        MissingExtra: no Ray.
    """
    global _users, _ours
    ray = ray_module()
    with _connecting:
        if ray.is_initialized():
            _check_same(ray, address)
        else:
            try:
                # `log_to_driver`: the output of functions belongs in the logs of their nodes.
                ray.init(address=address, namespace=namespace, log_to_driver=False, logging_level=logging.ERROR)
            except Exception as e:
                raise JobError(
                    f"no Ray cluster of ours at {address!r}: {_first_line(e)}",
                    remedy="start one (ray start --head) of the same Ray and Python versions, or give --ray-address",
                ) from e
            _ours = True
        _users += 1


def disconnect() -> None:
    """The inverse of one `connect`: the last one leaves the cluster, if `connect` had joined it."""
    global _users, _ours
    with _connecting:
        _users -= 1
        if _users == 0 and _ours:
            _ours = False
            ray_module().shutdown()


def nodes() -> list[ClusterNode]:
    """Those that are alive, in a fixed order."""
    found = [
        ClusterNode(
            id=node["NodeID"],
            host=node["NodeManagerHostname"],
            cpus=float(node["Resources"].get("CPU", 0.0)),
            memory_mb=float(node["Resources"].get("memory", 0.0)) / MIB,
            gpus=float(node["Resources"].get("GPU", 0.0)),
        )
        for node in ray_module().nodes()
        if node["Alive"]
    ]
    return sorted(found, key=lambda node: node.id)


def cpus_of(memory_mb: int, mb_per_vcpu: float) -> float:
    """CPUs to reserve for a memory quota: its share, rounded up to what Ray can count; whole ones above one.

    >>> cpus_of(1769, 1769.0), cpus_of(512, 1769.0), cpus_of(3000, 1769.0)
    (1.0, 0.2895, 2.0)
    """
    share = memory_mb / mb_per_vcpu
    return float(math.ceil(share)) if share > 1 else math.ceil(share * _GRAIN - 1e-9) / _GRAIN


def room(nodes: Sequence[ClusterNode], *, memory_mb: int, cpus: float, gpus: float = 0.0) -> int:
    """Number of functions that fit at once in an empty cluster. Each function is on one node."""
    fits = 0
    for node in nodes:
        by_memory = int(node.memory_mb // memory_mb)
        by_cpu = round(node.cpus * _GRAIN) // round(cpus * _GRAIN)
        # A part of a GPU is on one GPU, so what is left of each cannot be put together.
        by_gpu = by_cpu if gpus == 0 else int(node.gpus // gpus) if gpus >= 1 else int(node.gpus) * int(1 / gpus + 1e-9)
        fits += min(by_memory, by_cpu, by_gpu)
    return fits


def _check_same(ray: Any, address: str) -> None:
    known = str(ray.get_runtime_context().gcs_address)
    if address != "auto" and "://" not in address and address != known:
        raise JobError(
            f"this process is connected to the Ray cluster at {known}, not to {address!r}",
            remedy="call ray.shutdown() first, or give that address",
        )


def _first_line(e: BaseException) -> str:
    lines = str(e).strip().splitlines()
    return f"{type(e).__name__}: {lines[0]}" if lines else type(e).__name__
