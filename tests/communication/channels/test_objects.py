"""Folders and buckets: what goes wrong there, and what is left behind."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

import obstore
import pytest
from obstore.exceptions import GenericError

from ephemeron.communication.channels.object_store import ObjectsChannel
from ephemeron.communication.channels.wrappers import Metered
from ephemeron.errors import ChannelTimeout, ChannelUnreachable, JobError, KeyExists

T = TypeVar("T")


def run(scenario: Callable[[], Awaitable[T]]) -> T:
    async def main() -> T:
        return await scenario()

    return asyncio.run(main())


def test_a_folder_is_made_and_its_url_is_understood(tmp_path: Path) -> None:
    where = tmp_path / "with space" / "deep"

    async def scenario() -> None:
        async with ObjectsChannel.open(where.as_uri()) as channel:
            await channel.put("run/a", [b"x"])
        async with ObjectsChannel.folder(where) as again:
            assert await again.list("") == ["run/a"]

    run(scenario)
    assert (where / "run" / "a").read_bytes() == b"x"


def test_directories_do_not_pile_up_with_iterations(tmp_path: Path) -> None:
    async def scenario() -> None:
        channel = ObjectsChannel.folder(tmp_path)
        for iteration in range(50):
            keys = [f"run/g0/{iteration}/grad/{rank}/0" for rank in range(2)]
            for key in keys:
                await channel.put(key, [b"x"])
            await channel.delete(keys)
        assert await channel.list("") == []

    run(scenario)
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == ["run"]


def test_concurrent_puts_and_deletes_in_a_folder_never_fail(tmp_path: Path) -> None:
    async def scenario() -> None:
        async def churn(i: int) -> None:
            async with ObjectsChannel.folder(tmp_path) as channel:
                for n in range(100):
                    await channel.put(f"run/{n}/{i}", [b"x"])
                    assert await channel.fetch(f"run/{n}/{i}") is not None
                    await channel.list("run/")
                    await channel.delete([f"run/{n}/{i}"])

        await asyncio.gather(*(churn(i) for i in range(4)))

    run(scenario)


def test_a_killed_writers_leavings_are_no_objects(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a#1").write_bytes(b"half")

    async def scenario() -> None:
        channel = ObjectsChannel.folder(tmp_path)
        assert await channel.list("") == []
        assert await channel.fetch("run/a") is None
        await channel.put("run/a", [b"whole"])
        assert await channel.list("") == ["run/a"]

    run(scenario)


def test_what_killed_writers_had_begun_is_removed_below_a_prefix(tmp_path: Path) -> None:
    async def scenario() -> None:
        channel = ObjectsChannel.folder(tmp_path)
        for key in ("q.work/a", "q.log/a/b", "other/a", "run/a/b", "run/c"):
            await channel.put(key, [b"x"])
        for name in ("q.work/a#1", "q.work/b#12", "q.log/a+b#2", "run/a+b#1", "run/c#1", "other/a#1"):
            (tmp_path / name).write_bytes(b"begun")
        Metered(channel).discard_staged("q.")
        Metered(channel).discard_staged("run/a/")
        left = {f"{path.parent.name}/{path.name}" for path in tmp_path.glob("*/*#*")}
        assert left == {"run/c#1", "other/a#1"}
        assert await channel.list("") == ["other/a", "q.log/a/b", "q.work/a", "run/a/b", "run/c"]

    asyncio.run(scenario())


def test_a_full_disk_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def full(*_: object, **__: object) -> None:
        raise GenericError("Generic LocalFileSystem error: Unable to copy data: No space left on device (os error 28)")

    monkeypatch.setattr(obstore, "put_async", full)
    with pytest.raises(ChannelUnreachable, match="no space left on device") as caught:
        run(lambda: ObjectsChannel.folder(tmp_path).put("run/a", [b"x"]))
    assert tmp_path.as_uri() in str(caught.value)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    where = tmp_path / "small"
    where.mkdir()
    mounted = os.geteuid() == 0 and subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(where)], capture_output=True, check=False
    )
    if not mounted or mounted.returncode:
        pytest.skip("may not mount a small file system here")
    yield where
    subprocess.run(["umount", str(where)], check=True)


def test_a_really_full_disk_leaves_no_half_object(small_disk: Path) -> None:
    async def scenario() -> None:
        channel = ObjectsChannel.folder(small_disk)
        await channel.put("run/a", [b"small"])
        with pytest.raises(ChannelUnreachable, match="no space left on device"):
            await channel.put("run/a", [bytes(3_000_000)])
        assert bytes(await channel.fetch("run/a") or b"") == b"small"

    run(scenario)


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(ChannelUnreachable, match="file/below"):
        ObjectsChannel.folder(tmp_path / "file" / "below")


@pytest.mark.parametrize(
    ("url", "problem"),
    [
        ("file://host/path", "not a folder on this machine"),
        ("s3://", "names no bucket"),
        ("ftp://somewhere", "names no bucket"),
        ("s3://KEY:verysecret@bucket/prefix", "credentials do not belong"),
    ],
)
def test_a_wrong_url_is_refused_at_once(url: str, problem: str) -> None:
    with pytest.raises(JobError, match=problem) as caught:
        ObjectsChannel.open(url)
    assert "verysecret" not in str(caught.value)


def test_a_missing_bucket_is_not_taken_for_a_missing_object(s3: str) -> None:
    async def scenario() -> None:
        channel = ObjectsChannel.open("s3://not-our-bucket/prefix")
        calls: list[Awaitable[object]] = [
            channel.put("a", [b"x"]),
            channel.put("a", [b"x"], create=True),
            channel.fetch("a"),
            channel.delete(["a"]),
            channel.list("a"),
            channel.get("a", deadline=asyncio.get_running_loop().time() + 60),
        ]
        for call in calls:
            with pytest.raises(ChannelUnreachable, match=r"s3://not-our-bucket/prefix.*bucket does not exist") as caught:
                await call
            assert "\n" not in str(caught.value)

    run(scenario)


def test_nobody_listening_is_an_error_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "x")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "y")

    async def scenario() -> None:
        channel = ObjectsChannel.open("s3://bucket/prefix")
        with pytest.raises(ChannelUnreachable, match="cannot connect") as caught:
            await channel.fetch("a")
        assert "\n" not in str(caught.value)

    run(scenario)


ENDS = """
import asyncio, os, sys, threading, time
from ephemeron.communication.channels import open_channel
from ephemeron.errors import ChannelUnreachable

class Slow(asyncio.SelectorEventLoop):
    def call_soon_threadsafe(self, *args, **options):
        said = super().call_soon_threadsafe(*args, **options)
        if threading.current_thread() is not threading.main_thread():
            time.sleep(0.5)  # as on a busy machine
            os.write(1, b"left")
        return said

async def main():
    async with open_channel(sys.argv[1]) as channel:
        try:
            await channel.put("a", [b"x"])
        except ChannelUnreachable:
            return 2
    return 3

with asyncio.Runner(loop_factory=Slow) as runner:
    code = runner.run(main())
sys.exit(code)
"""


@pytest.mark.parametrize("fails", [False, True])
def test_a_process_ends_when_the_thread_that_reported_a_request_has_left_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: bool
) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:1",
        "AWS_ACCESS_KEY_ID": "x",
        "AWS_SECRET_ACCESS_KEY": "y",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    address = "s3://bucket/prefix" if fails else tmp_path.as_uri()
    done = subprocess.run([sys.executable, "-c", ENDS, address], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (2 if fails else 3, "left", "")


def test_permission_is_explained(s3: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from obstore.exceptions import PermissionDeniedError

    async def forbidden(*_: object, **__: object) -> None:
        raise PermissionDeniedError("403 Forbidden: <Error><Code>AccessDenied</Code></Error>")

    monkeypatch.setattr(obstore, "get_async", forbidden)
    with pytest.raises(ChannelUnreachable, match=r"permission denied \(AccessDenied\); check the credentials"):
        run(lambda: ObjectsChannel.open(s3).fetch("a"))


@pytest.mark.slow
def test_reads_of_objects_that_are_replaced_or_deleted_are_answered(s3: str) -> None:
    async def scenario() -> None:
        channel, done = ObjectsChannel.open(s3 + "/busy"), asyncio.Event()
        await channel.put("run/kept", [bytes(300_000)])

        async def write() -> None:
            for i in range(20):
                await channel.put("run/kept", [bytes([i]) * 300_000])
                await channel.put("run/gone", [bytes([i]) * 300_000])
                await channel.delete(["run/gone"])
            done.set()

        async def read(key: str, *, absent: bool) -> None:
            while not done.is_set():
                data = await channel.fetch(key)
                assert absent or data is not None
                assert data is None or bytes(data) == bytes([data[0]]) * 300_000

        readers = [read(key, absent=key == "run/gone") for key in ("run/kept", "run/gone") * 3]
        await asyncio.gather(write(), *readers)

    run(scenario)


def test_two_prefixes_of_a_bucket_do_not_meet(s3: str) -> None:
    async def scenario() -> None:
        one, two = ObjectsChannel.open(s3 + "/one"), ObjectsChannel.open(s3 + "/two")
        await one.put("run/lease", [b"1"], create=True)
        await two.put("run/lease", [b"2"], create=True)
        with pytest.raises(KeyExists):
            await one.put("run/lease", [b"3"], create=True)
        assert await one.list("") == ["run/lease"]
        with pytest.raises(ChannelTimeout):
            await one.get("run/other", deadline=0.0)

    run(scenario)
