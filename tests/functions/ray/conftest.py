"""One Ray cluster for all tests of this folder: room for three functions of training on either of its two nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from ray_world import World


@pytest.fixture(scope="session")
def shared_cluster() -> Iterator[World]:
    from ray_world import two_nodes

    with two_nodes(cpus=2, memory_mb=4096, gpus=1) as world:
        yield world


@pytest.fixture
def cluster(shared_cluster: World) -> Iterator[World]:
    """With two nodes, though the test before may have lost one."""
    while len(shared_cluster.workers) < 2:
        shared_cluster.replace()
    return shared_cluster
