"""The inventory of what killed clients have left, and its removal, in the folder of executors and in their channels."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from ephemeron import FunctionExecutor
from ephemeron.communication.channels import open_channel
from ephemeron.executor.remains import claimed, find_remains, remove_remains


def _left(folders: Path, run: str, address: str) -> Path:
    folder = folders / run
    (folder / "objects").mkdir(parents=True)
    (folder / "client.json").write_text(json.dumps({"address": address}))
    return folder


@pytest.fixture
def folders(tmp_path: Path) -> Path:
    return tmp_path / "home" / "tasks"


def test_objects_in_another_folder_are_found_and_removed(folders: Path, tmp_path: Path) -> None:
    address = (tmp_path / "store").as_uri()
    _left(folders, "map-1", address)
    inside = _left(folders, "map-2", (folders / "map-2" / "objects").resolve().as_uri())
    (inside / "objects" / "x").write_bytes(b"12345")

    async def scenario() -> None:
        async with open_channel(address) as store:
            await store.put("map-1.work/a", [b"1234567"])
            await store.put("map-1.log/a.000000", [b"123"])
            await store.put("map-10.work/a", [b"another's"])
            (tmp_path / "store" / "map-1.work" / "b#1").write_bytes(b"begun by a killed function")
            found = {each.run: each for each in await find_remains(folders)}
            assert {run: (each.objects, each.object_bytes, each.running) for run, each in found.items()} == {
                "map-1": (2, 10, ""),
                "map-2": (0, 0, ""),
            }
            assert found["map-2"].nbytes == found["map-2"].folder_bytes > 5
            assert await store.list("map-1.") != [], "an inventory removes nothing"
            assert [each.run for each in await remove_remains(folders)] == ["map-1", "map-2"]
            assert await store.list("") == ["map-10.work/a"]
        assert not list((tmp_path / "store" / "map-1.work").iterdir())
        assert not list(folders.iterdir())
        assert await find_remains(folders) == []

    asyncio.run(scenario())


def test_what_a_living_client_uses_is_listed_and_stays(folders: Path, tmp_path: Path) -> None:
    address = (tmp_path / "store").as_uri()
    folder = _left(folders, "map-1", address)

    async def scenario() -> None:
        async with open_channel(address) as store:
            await store.put("map-1.work/a", [b"1"])
            with claimed(folder, address):
                (found,) = await find_remains(folders)
                assert (found.running, found.objects) == ("its client runs", 1)
                assert await remove_remains(folders) == []
            assert await store.list("") == ["map-1.work/a"]

    asyncio.run(scenario())


def test_a_channel_that_does_not_answer_keeps_its_record(folders: Path) -> None:
    folder = _left(folders, "map-1", "redis://127.0.0.1:1/0")

    async def scenario() -> None:
        (found,) = await find_remains(folders)
        assert found.problem
        assert await remove_remains(folders) == []

    asyncio.run(scenario())
    assert folder.exists()


@pytest.mark.parametrize("address", ["redis://127.0.0.1:1/0", "store"])
def test_simulated_executors_are_not_stopped_by_the_remains_of_others(
    folders: Path, tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Remains lie in channels of real time, which would wait for ever in virtual time."""
    monkeypatch.setenv("EPHEMERON_HOME", str(folders.parent))
    is_removed = address == "store"
    folder = _left(folders, "map-1", (tmp_path / "store").as_uri() if is_removed else address)
    with FunctionExecutor("simulated", progress=False) as pool:
        for _ in range(3):
            assert pool.submit(divmod, 7, 2).result(60) == (3, 1)
        pool.shutdown()
        assert folder.exists() is not is_removed
