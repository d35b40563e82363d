from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from service_worlds import World, settings


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """`mixed` draws in a step that may be cached, on purpose."""
    folder = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(folder):
            item.add_marker(pytest.mark.filterwarnings("ignore:.*is marked can-cache:UserWarning"))


@pytest.fixture(scope="module")
def one_shard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A service that tests of a module share which do it no harm."""
    world = World(tmp_path_factory.mktemp("service"), settings())
    yield world
    world.close()


@pytest.fixture(scope="module")
def three_shards(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The same, each flow in three shards."""
    world = World(tmp_path_factory.mktemp("service"), settings(shards=3, loaders=3))
    yield world
    world.close()


@pytest.fixture
def own_world(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Services for one test alone."""
    worlds: list[World] = []

    def make(**changed: Any) -> World:
        worlds.append(World(tmp_path / f"service-{len(worlds)}", settings(**changed)))
        return worlds[-1]

    yield make
    for world in worlds:
        world.close()
