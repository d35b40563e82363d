"""The platform contract, on a Ray cluster of two nodes."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="no Ray; pip install 'ephemeron[ray]'")

from ray_world import World, opened

from ephemeron.events import Ended, Invoked
from ephemeron.functions.base import Limits, Platform
from ephemeron.testing.platform_contract import PlatformContract
from ephemeron.testing.platform_entries import declaration

pytestmark = pytest.mark.slow

ENTRY = {"EPHEMERON_ENTRIES": declaration(), "EPHEMERON_PRELOAD": ""}


class TestRayContract(PlatformContract):
    @pytest.fixture(autouse=True)
    def _world(self, cluster: World, tmp_path: Path) -> None:
        self.world, self.folder = cluster, tmp_path / "run"
        self.channel = (self.folder / "objects").as_uri()
        self.run_id = f"contract-{uuid.uuid4().hex[:8]}"

    @asynccontextmanager
    async def open(self, limits: Limits) -> AsyncIterator[Platform]:
        settings = self.world.settings(variables=ENTRY)
        async with opened(settings, self.folder, limits=limits, run=self.run_id) as platform:
            yield platform

    def test_functions_outlive_the_platform_and_another_one_hears_of_them(self) -> None:
        async def main() -> None:
            settings = self.world.settings(variables=ENTRY)
            async with asyncio.timeout(240):
                async with opened(settings, self.folder, run=self.run_id) as first:
                    started = await first.invoke(self.call(self.run_id, "forever"))
                    await self._events(first, self.run_id, lambda e: e.kind == "note")
                    await first.close()
                    async with opened(settings, self.folder, run=self.run_id) as second:
                        await second.cancel([started.id])
                        assert (await second.outcome(started.id)).status == "cancelled"
                        events = await self._events(second, self.run_id, lambda e: isinstance(e, Ended))
                        assert len([e for e in events if isinstance(e, Invoked)]) == 1

        asyncio.run(main())

    def test_nothing_is_left_on_the_cluster(self) -> None:
        import ray

        async def scenario(platform: Platform, run: str) -> None:
            await self._outcome(platform, self.call(run, "echo"))
            await platform.invoke(self.call(run, "forever", rank=1))

        self.run(scenario)
        mine = [a for a in ray.util.list_named_actors(all_namespaces=True) if self.run_id in a["namespace"]]
        assert mine == []


def test_a_node_that_dies_takes_its_function_along_and_the_watch_says_so(cluster: World, tmp_path: Path) -> None:
    async def main() -> None:
        kit = PlatformContract()
        kit.channel = (tmp_path / "objects").as_uri()
        async with asyncio.timeout(240), opened(cluster.settings(variables=ENTRY), tmp_path) as platform:
            calls = [await platform.invoke(kit.call("run", "forever", rank=rank)) for rank in range(2)]
            alive: set[int] = set()
            async for event in platform.events("run"):
                if event.kind == "note":
                    alive.add(len(alive))
                if len(alive) == 2:
                    break
            cluster.lose(cluster.workers[0])
            waits = [asyncio.create_task(c.wait()) for c in calls]
            done, left = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            assert len(done) == len(left) == 1, "one on each node"
            outcome = next(iter(done)).result()
            assert outcome.status == "lost"
            assert outcome.error
            assert outcome.billed_s > 0
            await platform.cancel_all("run")
            assert (await next(iter(left))).status == "cancelled"

    asyncio.run(main())
