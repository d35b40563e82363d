"""What executors of killed clients have left in their channels, and its removal by the next one."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from ephemeron import FunctionExecutor
from ephemeron.communication.channels import open_channel
from ephemeron.executor.remains import find_remains, remove_remains
from ephemeron.prices import load_prices
from ephemeron.runs import folders
from ephemeron.runs.folders import RunFolder
from ephemeron.runs.header import RunHeader, write_header
from ephemeron.runs.lock import LOCK_FILE, driving
from ephemeron.runs.status import status_of
from ephemeron.runs.summary import read_summary


def left(run: str, address: str) -> RunFolder:
    """An executor whose client was killed."""
    folder = folders.create(run)
    (folder.path / LOCK_FILE).touch()
    folder.events.touch()
    header = RunHeader(run_id=run, kind="tasks", platform="local", channel=address, prices=load_prices("objects"), ends_with_client=True)
    write_header(folder, header)
    return folder


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EPHEMERON_HOME", str(tmp_path / "home"))
    return folders.runs_folder()


def test_objects_in_another_folder_are_found_and_removed(runs: Path, tmp_path: Path) -> None:
    address = (tmp_path / "store").as_uri()
    first = left("map-1", address)
    inside = left("map-2", (runs / "map-2" / "objects").resolve().as_uri())
    inside.objects.mkdir()
    (inside.objects / "x").write_bytes(b"12345")

    async def scenario() -> None:
        async with open_channel(address) as store:
            await store.put("map-1.work/a", [b"1234567"])
            await store.put("map-1.log/a.000000", [b"123"])
            await store.put("map-10.work/a", [b"another's"])
            (tmp_path / "store" / "map-1.work" / "b#1").write_bytes(b"begun by a killed function")
            found = {each.folder.run_id: each for each in await find_remains(runs)}
            assert {run: (len(each.keys), each.nbytes, each.status) for run, each in found.items()} == {
                "map-1": (2, 10, "interrupted"),
                "map-2": (0, 0, "interrupted"),
            }
            assert await store.list("map-1.") != [], "an inventory removes nothing"
            assert [each.folder.run_id for each in await remove_remains(runs)] == ["map-1", "map-2"]
            assert await store.list("") == ["map-10.work/a"]
        assert not list((tmp_path / "store" / "map-1.work").iterdir())
        assert not inside.objects.exists()
        assert await find_remains(runs) == []

    asyncio.run(scenario())
    assert status_of(first) == "interrupted"
    summary = read_summary(first)
    assert summary is not None
    assert summary.causes == ("its client was killed",)


def test_what_a_living_client_uses_stays(runs: Path, tmp_path: Path) -> None:
    address = (tmp_path / "store").as_uri()
    folder = left("map-1", address)

    async def scenario() -> None:
        async with open_channel(address) as store:
            await store.put("map-1.work/a", [b"1"])
            with driving(folder):
                assert await find_remains(runs) == []
                assert await remove_remains(runs) == []
            assert await store.list("") == ["map-1.work/a"]

    asyncio.run(scenario())


def test_a_channel_that_does_not_answer_keeps_its_record(runs: Path) -> None:
    folder = left("map-1", "redis://127.0.0.1:1/0")

    async def scenario() -> None:
        (found,) = await find_remains(runs)
        assert found.problem
        assert await remove_remains(runs) == []

    asyncio.run(scenario())
    assert read_summary(folder) is None


@pytest.mark.parametrize("address", ["redis://127.0.0.1:1/0", "store"])
def test_simulated_executors_are_not_stopped_by_the_remains_of_others(runs: Path, tmp_path: Path, address: str) -> None:
    """Remains lie in channels of real time, which would wait for ever in virtual time."""
    is_removed = address == "store"
    folder = left("map-1", (tmp_path / "store").as_uri() if is_removed else address)
    with FunctionExecutor("simulated", progress=False) as pool:
        for _ in range(3):
            assert pool.submit(divmod, 7, 2).result(60) == (3, 1)
        pool.shutdown()
        assert (read_summary(folder) is not None) is is_removed
