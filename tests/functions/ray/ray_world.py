"""A Ray cluster of two nodes on loopback, and a platform on it."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import ExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ephemeron.functions.base import Limits
from ephemeron.functions.ray.platform import LIMITS, RayPlatform
from ephemeron.functions.ray.settings import RaySettings
from ephemeron.units import MIB

EVERY_S = 0.1
STORE_MB = 80
"""Ray's least, about: nothing of ours goes through it."""


class World:
    """The head has no room for functions; two nodes have."""

    def __init__(self, cluster: Any, node: Mapping[str, Any]) -> None:
        self.cluster, self._node = cluster, node
        self.workers = [cluster.add_node(**node) for _ in range(2)]

    def settings(self, **more: Any) -> RaySettings:
        return RaySettings(**{"address": self.cluster.address, "every_s": EVERY_S, **more}).located()

    def lose(self, node: Any) -> None:
        """A node dies at once."""
        self.workers.remove(node)
        self.cluster.remove_node(node, allow_graceful=False)

    def replace(self) -> None:
        """Another node in place of one that is lost."""
        with environment():
            self.workers.append(self.cluster.add_node(**self._node))
            self.cluster.wait_for_nodes()


@contextmanager
def environment() -> Iterator[None]:
    """Variables with which nodes are started."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        patch.setenv("PYTHONPATH", os.pathsep.join([str(Path(__file__).parents[3] / "src"), os.environ.get("PYTHONPATH", "")]))
        yield


@contextmanager
def two_nodes(*, cpus: int, memory_mb: int, gpus: int = 0) -> Iterator[World]:
    """A cluster; `cpus`, `memory_mb` and `gpus` of each of the two nodes. Ray counts GPUs that are not there, if told so."""
    import ray
    from ray.cluster_utils import Cluster

    head = {"num_cpus": 0, "object_store_memory": STORE_MB * MIB, "memory": 1, "include_dashboard": False}
    # By default Ray takes 15 s to believe that a node is dead.
    soon = {"health_check_period_ms": 300, "health_check_timeout_ms": 2_000, "health_check_failure_threshold": 5}
    node = {"num_cpus": cpus, "object_store_memory": STORE_MB * MIB, "memory": memory_mb * MIB, "num_gpus": gpus}
    with ExitStack() as stack:
        with environment():
            cluster = Cluster(initialize_head=True, head_node_args={**head, "_system_config": soon})
            stack.callback(cluster.shutdown)
            stack.callback(ray.shutdown)
            world = World(cluster, node)
            cluster.wait_for_nodes()
            ray.init(address=cluster.address, log_to_driver=False)
        yield world


@asynccontextmanager
async def opened(
    settings: RaySettings, folder: Path, *, limits: Limits = LIMITS, run: str = "run", channel: str = ""
) -> AsyncIterator[RayPlatform]:
    platform = await RayPlatform.open(folder, settings, channel=channel or (folder / "objects").as_uri(), run=run, limits=limits)
    try:
        yield platform
    finally:
        await platform.shutdown()
